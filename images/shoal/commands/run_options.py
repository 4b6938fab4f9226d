"""The options of the command `run`, and the job that they describe."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.commands.common import AsJson, OptionalImage, parse_pairs
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
    choose_code,
    choose_engine,
    read_options,
)
from shoal.errors import UsageError
from shoal.jobs import metric_definitions, store
from shoal.jobs.hosts.local import list_loopback_names
from shoal.jobs.job import LOCAL, JobRequest
from shoal.jobs.store import JobRecord, check_owners, read_record
from shoal.jobs.variables import parse_secrets, read_environment, restore_environment
from shoal.jobs.volumes import Volume

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
_SECRET_HELP = (
    "Secret for every host, in the file /run/secrets/NAME. It comes from this environment's variable NAME or FILE."
    " With ,type=env at the end it is also the variable NAME of the script. Repeatable."
)
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
