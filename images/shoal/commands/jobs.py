"""The command `run`: its options become a job, which runs to its end here or in the background."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import typer

from shoal import docker_client
from shoal.commands.common import (
    EVERY_DAY,
    app,
    load_matrix,
    parse_pairs,
    print_json,
    progress_console,
    resolve_tag,
    takes_fields_of,
)
from shoal.commands.job_run import prepare_image, print_report, run_to_end
from shoal.commands.run_options import RunOptions
from shoal.commands.script import ScriptCommand, print_source, print_source_notes, warn_of_visible_secrets
from shoal.commands.watch import watch_source
from shoal.console import CleanConsole, print_line
from shoal.docker_client import images as docker_images
from shoal.errors import ImageError, UsageError
from shoal.jobs import processes, summary
from shoal.jobs.job import JobRequest
from shoal.jobs.store import OUTPUT, KnownJob, open_job, read_job

_VISIBLE_FIX = "-e {name} or --secret {name} with a variable of your environment, or --env-file FILE"


@app.command("run", rich_help_panel=EVERY_DAY, epilog="More: docs/resume.md", cls=ScriptCommand)
@takes_fields_of(RunOptions)
def run_job(options: RunOptions) -> None:
    """Run a training job, and exit with its exit code.

    The script finds the data of a channel NAME in the directory SM_CHANNEL_NAME.

    It saves the model in SM_MODEL_DIR, which becomes model.tar.gz, and checkpoints in /opt/ml/checkpoints. Files in
    SM_OUTPUT_DATA_DIR become output.tar.gz. Files outside SM_OUTPUT_DIR are lost.

    Example: shoal run pytorch train.py -- --epochs 3

    In the background: shoal run --detach --name digits pytorch train.py

    An image with its own script: shoal run my-image:1 -- --epochs 3

    Several hosts: shoal run pytorch code/train.py --hosts 2 --procs-per-host 2

    With a launcher: shoal run pytorch --hosts 2 torchrun --nproc_per_node 2 train.py --epochs 3

    A module: shoal run pytorch -m package.train -- --epochs 3

    Survive failures: shoal run pytorch train.py --hosts 2 --max-restarts 3

    Run again after each edit: shoal run pytorch train.py --watch

    Continue a job: shoal run --resume code-20260131-101500-3f2a1c
    """
    record = options.to_record()
    request = record.request
    if options.list_files:
        print_source(request.selection, options.as_json)
        return
    _print_warnings(request, options)
    progress = progress_console(options.as_json)
    if options.watch:
        watch_source(options, progress)
    tag, build_seconds = prepare_image(request, options.build, progress)
    moved = processes.fork_to_background() if options.detach else None
    if isinstance(moved, Path):
        _print_started(read_job(moved), options.as_json)
        return
    record = dataclasses.replace(record, request=dataclasses.replace(request, image=tag))
    with open_job(record, options.resume, options.name) as opened:
        if moved:
            moved.open_log(opened.directory / OUTPUT)
            opened.on_started = functools.partial(moved.release_parent, opened.directory)
            progress = CleanConsole()  # not of the terminal
        result = run_to_end(opened, progress, options, build_seconds)
    summary.print_summary(progress, request, result)
    if options.as_json and not moved:
        print_json({name: value for name, value in vars(result).items() if name != "plan"})
    print_report(progress, result.report)
    raise typer.Exit(result.exit_code)


def _print_started(started: KnownJob, as_json: bool) -> None:
    if as_json:
        print_json(started.describe())
        return
    print_line(f"{started.name} runs in the background, in {started.directory}")
    print_line(f"logs: shoal logs --follow {started.name}")
    print_line(f"stop: shoal stop {started.name}")


def _print_warnings(request: JobRequest, options: RunOptions) -> None:
    """Prints notes about the code, and a warning for each visible secret. Raises `UsageError` if there is no script."""
    given = parse_pairs("--hyperparameter", options.hyperparameters)
    warn_of_visible_secrets(options.env, given, options.arguments, _VISIBLE_FIX)
    if request.source is not None:
        print_source_notes(request.selection)
    elif request.entry_point is None:
        _check_image_has_script(resolve_tag(request.image), request)


def _check_image_has_script(tag: str, request: JobRequest) -> None:
    if docker_images.SCRIPT_VARIABLES & request.environment.keys():
        return
    matrix = load_matrix()
    # Images of the matrix name no script, built or not.
    if not matrix or tag not in [image.tag for image in matrix.images]:
        client = docker_client.connect()
        image = docker_images.find_image(client, tag)
        if image is None:
            raise ImageError(docker_images.describe_missing(client, tag, matrix))
        if docker_images.has_script(image):
            return
    raise UsageError(
        f"SCRIPT: missing, and the image {tag} names none. Fix: shoal run IMAGE SCRIPT, such as shoal run {tag}"
        " train.py, or in the image's Dockerfile, ENV SAGEMAKER_PROGRAM=train.py"
    )
