"""Jobs: run, planned, and what they did."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from shoal.builds import builder
from shoal.commands import output
from shoal.commands.common import AsJson, Image, app, console, open_project, reports, screen, tag_of, tell_written
from shoal.commands.endings import judge
from shoal.errors import UsageError
from shoal.jobs import docker_job as runner
from shoal.jobs import local_job, model_plan, summary
from shoal.jobs.job import SHM_SIZE, JobRequest
from shoal.report import timeline

HYPERPARAMETER_HELP = (
    "Repeatable. VALUE is JSON where it is valid JSON (1.10 is a number, '\"1.10\"' a text), else a text."
)

GPUS_HELP = (
    "GPUs of the job, divided equally over its hosts; indexes or UUIDs, as nvidia-smi -L lists them. Default: all."
)
PLAN_HELP = "--mp-parameters JSON, --devices N, --memory GIB, --optimizer sgd|momentum|adam."


class Engine(StrEnum):
    """Where a job runs."""

    docker = "docker"
    none = "none"


@app.command("run")
def run_job(
    image: Image,
    source: Annotated[Path, typer.Option(help="The directory with the script.")],
    entry_point: Annotated[str, typer.Option(help="The script, relative to --source.")],
    hosts: Annotated[int, typer.Option(min=1, help="Containers that play hosts.")] = 1,
    procs_per_host: Annotated[int | None, typer.Option(min=1, help="MPI ranks a host.")] = None,
    channel: Annotated[list[str] | None, typer.Option(metavar="NAME=DIR", help="Input data; repeatable.")] = None,
    hyperparameter: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help=HYPERPARAMETER_HELP)] = None,
    distribution: Annotated[str, typer.Option(metavar="JSON", help="The estimator's distribution.")] = "{}",
    env: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="For every host; repeatable.")] = None,
    jobs: Annotated[Path, typer.Option("--output", help="Where the job's directory is made.")] = Path("jobs"),
    shm_size: Annotated[str | None, typer.Option(help="/dev/shm of each host. Default: 1g")] = None,
    memory: Annotated[str | None, typer.Option(help="Of each host, such as 512m or 8g. Default: all.")] = None,
    gpus: Annotated[str | None, typer.Option(metavar="all|none|0,1", help=GPUS_HELP)] = None,
    build: Annotated[bool, typer.Option("--build", help="Bring the image up to date first.")] = False,
    engine_kind: Annotated[
        Engine, typer.Option("--engine", help="none: on this machine, without Docker.")
    ] = Engine.docker,
    as_json: AsJson = False,
) -> None:
    """Run a training job, and exit with its verdict."""
    request = JobRequest(
        source=source,
        entry_point=entry_point,
        hosts=hosts,
        procs_per_host=procs_per_host,
        channels={name: Path(value) for name, value in _pairs("--channel", channel).items()},
        hyperparameters=_pairs("--hyperparameter", hyperparameter),
        distribution=_json_object("--distribution", distribution),
        environment=_pairs("--env", env),
        output=jobs,
        shm_size=shm_size or SHM_SIZE,
        memory=memory,
        gpus=gpus,
    )
    request.check()
    progress = screen(as_json)
    build_seconds = None
    if engine_kind is Engine.none:
        tag_of(image)
        _refuse_limits({"--shm-size": shm_size, "--memory": memory})
        outcome = local_job.run(request, progress)
    else:
        tag, build_seconds = _built(image, progress) if build else (tag_of(image), None)
        outcome = runner.run(tag, request, progress)
    summary.show(progress, request, outcome, build_seconds)
    if as_json:
        output.write({**vars(outcome), "build_seconds": build_seconds})
    raise typer.Exit(outcome.exit_code)


@app.command("plan-model", context_settings={"ignore_unknown_options": True})
def plan_model(
    image: Image,
    factory: Annotated[str, typer.Argument(metavar="FILE.py:NAME", help="What gives the model and a batch.")],
    options: Annotated[list[str] | None, typer.Argument(metavar="[OPTION]...", help=PLAN_HELP)] = None,
    engine_kind: Annotated[Engine, typer.Option("--engine", help="none: with this machine's Python.")] = Engine.docker,
    as_json: AsJson = False,
) -> None:
    """Say what model parallelism would do to a model, and recommend mp_parameters, without training it.

    Memory of each stage, idle time and the partition, from a run on the meta device: a model of any size will do.
    """
    if engine_kind is Engine.none:
        code = model_plan.run_here(factory, options or [], as_json=as_json)
    else:
        code = model_plan.run_in(tag_of(image), factory, options or [], screen(as_json), as_json=as_json)
    raise typer.Exit(code)


@reports.command("timeline")
def report_timeline(
    paths: Annotated[list[Path], typer.Argument(metavar="FILE|DIRECTORY...", help="What the ranks have recorded.")],
    page: Annotated[Path, typer.Option("-o", "--output", help="The page.")] = Path("timeline.html"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Also write the ranks as one Chrome trace, beside the page.")
    ] = False,
) -> None:
    """Show when the ranks of a job computed, communicated and waited, and who was late."""
    analysis, written = timeline.report(paths, page, as_json)
    timeline.show(console, analysis)
    tell_written(written)


def _built(name: str, progress: Console) -> tuple[str, float]:
    """Bring an image of the matrix up to date; return its tag, and the seconds that it took."""
    here, matrix = open_project()
    image = matrix.select(name)
    started = time.monotonic()
    judge(builder.build_images(here, matrix, [image], progress, jobs=1), progress)
    return image.tag, time.monotonic() - started


def _refuse_limits(given: Mapping[str, str | None]) -> None:
    """Raise `UsageError` where a limit of a container is given to a job that has none."""
    if options := ", ".join(name for name, value in given.items() if value):
        raise UsageError(f"{options}: has no effect on a job without a container. Fix: leave out it or --engine none.")


def _pairs(option: str, words: list[str] | None) -> dict[str, str]:
    pairs = {}
    for word in words or ():
        key, equals, value = word.partition("=")
        if not key or not equals:
            raise UsageError(f"{option} {word}: expected NAME=VALUE, such as {option} name=value")
        if key in pairs:
            raise UsageError(f"{option} {key}: given twice")
        pairs[key] = value
    return pairs


def _json_object(option: str, text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise UsageError(f'{option}: not JSON: {error}. Example: \'{{"mpi": {{"enabled": true}}}}\'') from error
    if not isinstance(document, dict):
        raise UsageError(f"{option}: expected a JSON object, found {text}")
    return document
