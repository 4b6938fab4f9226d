"""The command `run`: its options become a job, which runs to its end here or in the background."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from shoal import docker_client
from shoal.builds import builder
from shoal.commands.common import (
    EVERY_DAY,
    AsJson,
    OptionalImage,
    app,
    convert_error,
    load_matrix,
    open_project,
    parse_pairs,
    print_failure,
    print_json,
    progress_console,
    report_builds,
    resolve_tag,
    takes_fields_of,
)
from shoal.commands.script import (
    Arguments,
    Env,
    EnvFile,
    FollowLinks,
    Hyperparameters,
    Include,
    ListFiles,
    Local,
    Module,
    RunEngine,
    Script,
    ScriptCommand,
    choose_code,
    choose_engine,
    print_source,
    print_source_notes,
    read_options,
    warn_of_visible_secrets,
)
from shoal.console import CleanConsole, print_line
from shoal.docker_client import images as docker_images
from shoal.errors import ImageError, UsageError
from shoal.jobs import metric_definitions, processes, store, summary, trackers
from shoal.jobs.changes import Changes, may_be_edits
from shoal.jobs.hosts.docker import NOT_COLLECTED, DockerHosts, open_hosts, run_job_in_docker, run_on_hosts
from shoal.jobs.hosts.local import list_loopback_names, run_job_locally
from shoal.jobs.job import DOCKER, LOCAL, FinishedJob, JobRequest
from shoal.jobs.source_files import Selection
from shoal.jobs.store import (
    FAILED,
    OUTPUT,
    STOPPED,
    WAITING,
    JobRecord,
    KnownJob,
    OpenJob,
    check_owners,
    note_owners,
    open_job,
    read_job,
    read_record,
)
from shoal.jobs.variables import parse_secrets, read_environment, restore_environment
from shoal.jobs.view import LiveView, PlainView, View, can_show_panel
from shoal.jobs.volumes import Volume
from shoal.report import job_collection

_GPUS_HELP = "GPUs of the job, divided evenly between hosts: indexes or UUIDs from nvidia-smi -L. Default: all."
_CHECKPOINTS_HELP = (
    "Directory for checkpoints: copied to /opt/ml/checkpoints before the start, and replaced by it at the end. It"
    " belongs to one job. Default: in the job's directory."
)
_RESUME_HELP = (
    "Continue a job from its checkpoints, with the same options. Those that you give again replace or extend them."
    " JOB is the name of its directory in --output."
)
_RESTARTS_HELP = "How often to start again after a lost rank or host, from the last checkpoint. Default: 0."
_HOSTS_HELP = (
    "Number of hosts (one container each). Default: 1. 2:4 starts 4 hosts, and the job goes on with at least 2 of them"
    " while lost ones are replaced. Without --procs-per-host and --distribution, each runs the script once."
)
_VOLUME_HELP = "File or directory of this machine, and its place on every host. :ro: read-only. Repeatable."
_NAME_HELP = "Name of the new job and its directory: letters, digits and hyphens. Default: a unique name."
_DETACH_HELP = "Return when the job has started. `shoal ps`, `shoal logs` and `shoal stop` continue from there."
_WATCH_HELP = (
    "Run again when a file of the source changes. Ctrl-C ends a run, and a second one the command. Each run is a new"
    " job, with containers that were made ready before."
)
_METRIC_HELP = (
    "Metric of the live view, the report and metrics.jsonl, as in an estimator's metric definitions. Its value is the"
    " first group of the expression in the log. Repeatable."
)


_SHOWN_CHANGES = 5
_PACKAGE_FILES = frozenset({"requirements.txt", "uv.lock", "pylock.toml", "pyproject.toml"})
"""Files of a source that decide which packages a job has."""
_SECRET_HELP = (
    "Secret for every host, in the file /run/secrets/NAME. It comes from this environment's variable NAME or FILE."
    " With ,type=env at the end it is also the variable NAME of the script. Repeatable."
)
_VISIBLE_FIX = "-e {name} or --secret {name} with a variable of your environment, or --env-file FILE"
_READERS: Mapping[str, Callable[[Any], Any]] = {
    "channels": lambda words: {name: Path(value) for name, value in parse_pairs("--channel", words).items()},
    "secrets": parse_secrets,
    "volumes": lambda words: tuple(map(Volume.parse, words)),
}
_EXTENDED = ("channels", "hyperparameters", "environment", "taken")
"""Fields of a resumed job that are extended by those that are given again, name by name."""


@dataclass(frozen=True)
class RunOptions:
    """The options of `shoal run`."""

    image: OptionalImage = None
    script: Script = None
    arguments: Arguments = None
    module: Module = None
    source: Annotated[Path | None, typer.Option(help="Directory with the script. Default: the one of SCRIPT.")] = None
    entry_point: Annotated[str | None, typer.Option(help="Script, relative to --source, instead of SCRIPT.")] = None
    hosts: Annotated[str | None, typer.Option("--hosts", "--nnodes", metavar="N|MIN:MAX", help=_HOSTS_HELP)] = None
    procs_per_host: Annotated[
        int | None,
        typer.Option(
            "--procs-per-host",
            "--nproc-per-node",
            min=1,
            help="Ranks per host. MPI starts them, or the launcher of --distribution or of a command such as torchrun.",
        ),
    ] = None
    channels: Annotated[
        list[str] | None,
        typer.Option("--channel", metavar="NAME=DIR", help="Directory with input data. Repeatable."),
    ] = None
    hyperparameters: Hyperparameters = None
    metric: Annotated[list[str] | None, typer.Option(metavar="NAME=REGEX", help=_METRIC_HELP)] = None
    distribution: Annotated[
        str | None, typer.Option(metavar="JSON", help="The distribution argument of a SageMaker estimator.")
    ] = None
    env: Env = None
    env_file: EnvFile = None
    secrets: Annotated[
        list[str] | None, typer.Option("--secret", metavar="NAME[=FILE][,type=env]", help=_SECRET_HELP)
    ] = None
    include: Include = None
    follow_links: FollowLinks = False
    list_files: ListFiles = False
    output: Annotated[Path, typer.Option("--output", help="Directory in which to create the job's directory.")] = Path(
        "jobs"
    )
    shm_size: Annotated[
        str | None, typer.Option(help="Size of /dev/shm per host, such as 512m or 2g. Default: 1g.")
    ] = None
    memory: Annotated[
        str | None, typer.Option(help="Memory limit per host, such as 512m or 8g. Default: no limit.")
    ] = None
    cpus: Annotated[
        float | None, typer.Option(min=0.01, help="Processor cores per host, such as 2 or 0.5. Default: no limit.")
    ] = None
    volumes: Annotated[
        list[str] | None, typer.Option("--volume", "-v", metavar="PATH:TARGET[:ro]", help=_VOLUME_HELP)
    ] = None
    gpus: Annotated[str | None, typer.Option(metavar="all|none|0,1", help=_GPUS_HELP)] = None
    checkpoints: Annotated[Path | None, typer.Option(metavar="DIR", help=_CHECKPOINTS_HELP)] = None
    resume: Annotated[str | None, typer.Option(metavar="JOB", help=_RESUME_HELP)] = None
    max_restarts: Annotated[int | None, typer.Option(min=0, metavar="N", help=_RESTARTS_HELP)] = None
    build: Annotated[bool, typer.Option("--build", help="Build the image first, if it is not up to date.")] = False
    engine: Annotated[
        RunEngine | None,
        typer.Option(
            "--engine", help="none: run on this machine, without Docker. Default: docker.", show_default=False
        ),
    ] = None
    local: Local = False
    name: Annotated[str | None, typer.Option(metavar="NAME", help=_NAME_HELP)] = None
    detach: Annotated[bool, typer.Option("--detach", "-d", help=_DETACH_HELP)] = False
    watch: Annotated[bool, typer.Option("--watch", help=_WATCH_HELP)] = False
    plain: Annotated[bool, typer.Option("--plain", help="Print plain lines, without a live view on a terminal.")] = (
        False
    )
    as_json: AsJson = False

    def to_record(self) -> JobRecord:
        """Returns the job to run, checked: a new one, or the one to resume with the options that are given again.

        The image may still be the name of a framework. Raises `UsageError`.
        """
        given = self._read_fields()
        if self.resume is None:
            if self.image is None:
                raise UsageError(
                    "IMAGE, SCRIPT: missing. Fix: shoal run IMAGE SCRIPT, such as shoal run pytorch train.py, or to"
                    " continue an earlier job, shoal run --resume JOB"
                )
            if self.name is not None:
                store.check_name(self.name, self.output)
            record = JobRecord(JobRequest(**given))
        elif self.name is not None:
            raise UsageError(f"--name {self.name}: a resumed job keeps its name, {self.resume}. Fix: leave out --name")
        else:
            earlier = read_record(self.output, self.resume)
            request = _extend_request(earlier.request, given, f"--resume {self.resume}")
            check_owners(earlier, request, f"--resume {self.resume}")
            record = dataclasses.replace(earlier, request=request)
        record.request.check()
        if record.request.engine == LOCAL:
            _check_local(record.request)
        if self.watch:
            self._check_watch(record.request)
        return record

    def _check_watch(self, request: JobRequest) -> None:
        """Raises `UsageError` for options that are of one job, or need an end."""
        given = {
            "--resume": self.resume,
            "--name": self.name,
            "--checkpoints": self.checkpoints,
            "--detach": self.detach,
            "--json": self.as_json,
        }
        if options := ", ".join(name for name, value in given.items() if value):
            raise UsageError(
                f"--watch and {options}: contradict each other, as each run is a new job with checkpoints and a name of"
                f" its own. Fix: leave out {options}"
            )
        if request.source is None:
            raise UsageError("--watch: the image has the code, so no file can change. Fix: name SCRIPT")

    def _read_fields(self) -> dict[str, Any]:
        given = read_options(self, JobRequest, _READERS)
        environment, taken = read_environment(self.env, self.env_file)
        given |= {name: value for name, value in (("environment", environment), ("taken", taken)) if value}
        if engine := choose_engine(self.engine, self.local):
            given["engine"] = engine.value
        if self.hosts is not None:
            given |= _parse_hosts(self.hosts)
        given |= choose_code(self.script, self.module, self.source, self.entry_point)
        if hyperparameters := self._read_hyperparameters():
            given["hyperparameters"] = hyperparameters
        return given

    def _read_hyperparameters(self) -> dict[str, str]:
        found = parse_pairs("--hyperparameter", self.hyperparameters)
        metric_definitions.check_definitions(found)
        if metrics := parse_pairs("--metric", self.metric):
            name = metric_definitions.HYPERPARAMETER
            if name in found:
                raise UsageError(f"--metric and --hyperparameter {name}: both define metrics. Fix: leave out one")
            found[name] = metric_definitions.encode_definitions(metrics)
        return found


def _extend_request(earlier: JobRequest, given: dict[str, Any], option: str) -> JobRequest:
    """Values that the record does not have are read again from where they came."""
    extended = {name: {**getattr(earlier, name), **given[name]} for name in _EXTENDED if name in given}
    request = dataclasses.replace(earlier, **{**given, **extended})
    now = given.get("environment", {})
    taken = {name: place for name, place in request.taken.items() if name not in now or name in given.get("taken", {})}
    missing = {name: place for name, place in taken.items() if name not in now}
    environment = {**request.environment, **restore_environment(missing, option)}
    again = {secret.name for secret in given.get("secrets", ())}
    secrets = (*(each for each in earlier.secrets if each.name not in again), *given.get("secrets", ()))
    return dataclasses.replace(request, environment=environment, taken=taken, secrets=secrets)


def _parse_hosts(text: str) -> dict[str, int]:
    least, colon, most = text.rpartition(":")
    numbers = [int(word) if re.fullmatch("[0-9]{1,6}", word) else 0 for word in ([least, most] if colon else [most])]
    if not all(numbers):
        raise UsageError(
            f"--hosts {text}: expected a number from 1 on, or MIN:MAX. Fix: such as --hosts 4, or --hosts 2:4"
        )
    return {"hosts": numbers[-1], "min_hosts": numbers[0] if colon else 0}


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
    tag, build_seconds = _prepare_image(request, options.build, progress)
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
        result = _run_to_end(opened, progress, options, build_seconds)
    summary.print_summary(progress, request, result)
    if options.as_json and not moved:
        print_json({name: value for name, value in vars(result).items() if name != "plan"})
    _print_report(progress, result.report)
    raise typer.Exit(result.exit_code)


def watch_source(options: RunOptions, progress: Console) -> NoReturn:
    """Runs a job, and again after each change of its source, until an interrupt comes while none runs.

    Raises `typer.Exit` with the exit code of an interrupt.
    """
    earlier = note_owners(options.to_record())  # of the files that decide what runs: they must not change
    first = earlier.request
    files = [*(options.env_file or ()), *(secret.file for secret in first.secrets if secret.file)]
    changes = Changes(_leave_out_written(first), tuple(files))
    was_interrupted = _run_watched(options, progress, None, earlier)
    while True:
        changed = changes.find()
        with _open_stack() as stack:
            try:
                print_line("watching for changes; Ctrl-C ends", progress)
                ready = _make_ready(options, progress, stack, earlier)
                changed = _skip_own_changes(changed, was_interrupted, first, progress) or changes.wait()
            except KeyboardInterrupt:
                raise typer.Exit(128 + signal.SIGINT) from None
            print_line(f"changed: {_join_changes(changed)}; running {first.entry_point} again", progress)
            if ready is None or not ready.fits(options, changed, earlier):
                _close(stack)
                ready = None
            was_interrupted = _run_watched(options, progress, ready, earlier)


@contextlib.contextmanager
def _open_stack() -> Iterator[contextlib.ExitStack]:
    stack = contextlib.ExitStack()
    try:
        yield stack
    finally:
        _close(stack)


def _close(stack: contextlib.ExitStack) -> None:
    """Removes the hosts in a stack. An error is printed: Docker may have been restarted, and the next run goes on."""
    try:
        stack.close()
    except Exception as error:
        failure = convert_error(error)
        if failure is None:
            raise
        print_failure(failure)


def _leave_out_written(request: JobRequest) -> Selection:
    """Returns the source without the directories that are mounted in the hosts, and that the job can write."""
    written = [volume.source.absolute() for volume in request.volumes if not volume.read_only]
    script = request.selection.directory.absolute() / request.selection.script
    others = (place for place in written if not script.is_relative_to(place))  # its source is watched all the same
    return dataclasses.replace(request.selection, elsewhere=(*request.selection.elsewhere, *others))


def _skip_own_changes(changed: list[str], was_interrupted: bool, request: JobRequest, progress: Console) -> list[str]:
    """Returns the changes during a run that start the next one, and prints those that start none.

    A job that writes beside its code would run for ever. After an interrupt, no change of such a job starts a run, so
    that the next interrupt ends the command.
    """
    can_write = request.engine == LOCAL or any(not volume.read_only for volume in request.volumes)
    if not (changed and can_write):
        return changed
    if was_interrupted:
        print_line(f"changed during the interrupted run: {_join_changes(changed)}; the next change runs it", progress)
        return []
    if not may_be_edits(changed):
        print_line(f"the job itself has changed {_join_changes(changed)}; this starts no run", progress)
        return []
    return changed


def _join_changes(changed: Sequence[str]) -> str:
    more = f" and {len(changed) - _SHOWN_CHANGES} more" if len(changed) > _SHOWN_CHANGES else ""
    return ", ".join(changed[:_SHOWN_CHANGES]) + more


@dataclass(frozen=True)
class ReadyJob:
    """A job with hosts that wait for its start."""

    opened: OpenJob
    hosts: DockerHosts

    def fits(self, options: RunOptions, changed: Sequence[str], earlier: JobRecord) -> bool:
        """Returns whether its hosts can run the job as it is now, and gives them the present source."""
        names = {name.split(" ")[0] for name in changed}
        if _PACKAGE_FILES & names or any(name.startswith("/") for name in names):  # other packages or secrets
            return False
        try:
            request = options.to_record().request
            check_owners(earlier, request, "--watch")
            tag, _ = _prepare_image(request, False, self.hosts.console)
            now = dataclasses.replace(self.opened.record.request, image=tag)
            if dataclasses.replace(request, image=tag) != now or not self.hosts.has_image(tag):
                return False
            return self.hosts.take_source()
        except NOT_COLLECTED:  # the run without it reports the error, if it is still there
            return False


def _make_ready(
    options: RunOptions, progress: Console, stack: contextlib.ExitStack, earlier: JobRecord
) -> ReadyJob | None:
    """Creates and starts the hosts of the next run; without Docker, or after an error, there are none."""
    try:
        record = options.to_record()
        if record.request.engine == LOCAL:
            return None
        check_owners(earlier, record.request, "--watch")
        tag, _ = _prepare_image(record.request, False, progress)
        record = dataclasses.replace(record, request=dataclasses.replace(record.request, image=tag))
        opened = stack.enter_context(open_job(record, None))
        opened.update(state=WAITING)
        return ReadyJob(opened, stack.enter_context(open_hosts(opened, PlainView(progress), waits=True)))
    except Exception as error:
        if convert_error(error) is None:
            raise
        _close(stack)  # the run reports the error, if it is still there
        return None


def _run_watched(options: RunOptions, progress: Console, ready: ReadyJob | None, earlier: JobRecord) -> bool:
    """Runs a job, and prints how it ended. An error, or an interrupt of the run, is printed, and ends only the run.

    Args:
        earlier: A record with the owners of the files that decide what runs.

    Returns:
        Whether it was interrupted.
    """
    with _open_stack() as stack:
        try:
            build_seconds = None
            record = options.to_record()
            check_owners(earlier, record.request, "--watch")
            if ready is None:
                tag, build_seconds = _prepare_image(record.request, options.build, progress)
                record = dataclasses.replace(record, request=dataclasses.replace(record.request, image=tag))
                opened = stack.enter_context(open_job(record, None))
            else:
                opened = ready.opened
                opened.begin()
                opened.log.began = time.time()
            result = _run_to_end(opened, progress, options, build_seconds, ready.hosts if ready else None)
            stack.close()
        except KeyboardInterrupt as interrupt:
            if isinstance(interrupt.__context__, KeyboardInterrupt):  # the second one did not wait for the script
                raise typer.Exit(128 + signal.SIGINT) from None
            return True
        except Exception as error:
            failure = convert_error(error)
            if failure is None:
                raise
            print_failure(failure)
            return False
    summary.print_summary(progress, opened.record.request, result)
    _print_report(progress, result.report)
    return False


def _run_to_end(
    opened: OpenJob,
    progress: Console,
    options: RunOptions,
    build_seconds: float | None,
    hosts: DockerHosts | None = None,
) -> FinishedJob:
    """Runs a job, records how it ended, also after an error, writes its report, and returns its result.

    Args:
        hosts: Hosts that wait for its start.
    """
    run = run_job_locally if opened.record.request.engine == LOCAL else run_job_in_docker
    try:
        with _open_view(opened, progress, options) as view:
            if hosts is not None:
                hosts.view = view
                result = run_on_hosts(opened, hosts)
            else:
                result = run(opened, view)
    except BaseException as error:
        code, state = _describe_exception(error)
        is_lost = opened.resumed and opened.record.uncollected and not opened.log.lines
        if not is_lost:  # otherwise hosts of the earlier command may still run, and `shoal stop` must find them
            with contextlib.suppress(OSError):  # of a full disk: `error` tells more
                opened.finish(code, state)
        if opened.log.lines:
            page = job_collection.write_job_report(progress, opened, None)
            _print_report(progress, page)
        if opened.has_checkpoints:
            summary.print_resume_command(progress, opened.record.request, opened.name)
        if state == STOPPED:  # the last line, because `train` reports a failure
            with contextlib.suppress(OSError):  # the terminal is gone
                print_line(f"{opened.name}: {summary.describe_stop(code)}", progress)
        raise
    opened.finish(result.exit_code)
    checkpoints = opened.checkpoints.path if opened.has_checkpoints else None
    not_finite = {name: str(value) for (name, _, _), value in opened.log.not_finite.items()}
    result = dataclasses.replace(
        result,
        checkpoints=checkpoints,
        build_seconds=build_seconds,
        not_finite=not_finite,
        metrics={**opened.log.last_metrics, **result.metrics},
        trackers=trackers.find_trackers(opened.outputs.values()),
    )
    return dataclasses.replace(result, report=job_collection.write_job_report(progress, opened, result))


def _describe_exception(error: BaseException) -> tuple[int, str]:
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT, STOPPED
    if isinstance(error, SystemExit):
        return int(error.code or 1), STOPPED
    failure = convert_error(error) if isinstance(error, Exception) else None
    return failure.exit_code if failure else 1, FAILED


def _print_started(started: KnownJob, as_json: bool) -> None:
    if as_json:
        print_json(started.describe())
        return
    print_line(f"{started.name} runs in the background, in {started.directory}")
    print_line(f"logs: shoal logs --follow {started.name}")
    print_line(f"stop: shoal stop {started.name}")


def _print_report(progress: Console, page: Path | None) -> None:
    if page:
        print_line(f"report: {page}", progress)


def _open_view(opened: OpenJob, progress: Console, options: RunOptions) -> contextlib.AbstractContextManager[View]:
    if options.plain or options.as_json or not can_show_panel(progress, os.environ):
        return contextlib.nullcontext(PlainView(progress))
    request = opened.record.request
    merged = 1 if request.engine == LOCAL and not request.min_hosts else request.hosts
    hosts = f"{request.min_hosts}:{request.hosts}" if request.min_hosts else str(merged)
    ranks = request.hosts * (request.procs_per_host or 1)
    return LiveView(progress, opened.log, opened.name, hosts, ranks)


def _print_warnings(request: JobRequest, options: RunOptions) -> None:
    """Prints notes about the code, and a warning for each visible secret. Raises `UsageError` if there is no script."""
    given = parse_pairs("--hyperparameter", options.hyperparameters)
    warn_of_visible_secrets(options.env, given, options.arguments, _VISIBLE_FIX)
    if request.source is not None:
        print_source_notes(request.selection)
    elif request.entry_point is None:
        _check_image_has_script(resolve_tag(request.image), request)


def _prepare_image(request: JobRequest, build: bool, progress: Console) -> tuple[str, float | None]:
    """Builds the image if `build`, and prints the result. Returns its tag, and the seconds that the build took."""
    if not build or request.engine != DOCKER:
        return resolve_tag(request.image), None
    here, matrix = open_project()
    image = matrix.select(request.image)
    started = time.monotonic()
    report_builds(builder.build_images(here, matrix, [image], progress, jobs=1), progress)
    return image.tag, time.monotonic() - started


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


def _check_local(request: JobRequest) -> None:
    if request.source is None and request.entry_point is None:
        raise UsageError("SCRIPT: missing, and without Docker no image names one. Fix: shoal run IMAGE SCRIPT")
    given = {
        "--shm-size": request.shm_size,
        "--memory": request.memory,
        "--cpus": request.cpus,
        "--volume": request.volumes,
    }
    if options := ", ".join(name for name, value in given.items() if value):
        raise UsageError(f"{options}: has no effect without a container. Fix: leave out {options} or --engine none")
    if request.min_hosts:
        list_loopback_names(request)
