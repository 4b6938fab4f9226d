"""A training job as `shoal run` sees it: the request, the /opt/ml tree of each host, and the result."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import docker.errors
import docker.utils

from shoal.docker_client import containers
from shoal.errors import UsageError, did_you_mean
from shoal.jobs import distribution, gpus, source_files
from shoal.jobs.source_files import Selection
from shoal.jobs.variables import Secret, check_place, check_secret_variables
from shoal.jobs.volumes import Volume

DOCKER, LOCAL = "docker", "none"
"""The places in which a job of `shoal run` runs: containers, or this machine without Docker."""
SECRET, SECRET_FILE = "SHOAL_JOB_SECRET", "SHOAL_JOB_SECRET_FILE"
"""The variables with the job's secret, by which its hosts recognize each other, or with the path of a file with it.

`train` accepts only one of the two."""
_SECRET_LENGTHS = range(16, 4096 + 1)  # characters that `train` takes in a file
RESOURCE_CONFIG = "input/config/resourceconfig.json"
"""The only file of the tree that differs between hosts."""
MEMBERS_ONLY = {"SHOAL_MEMBERS_ONLY": "1"}
"""The variable with which ranks refuse connections of other users, containers and machines. `-e` can change it."""
REPORTED_VARIABLES = "SHOAL_REPORTED_VARIABLES"
"""The variable with the names of those that `train` lists in job.json, with masked secrets."""
MAX_RESTARTS, MIN_HOSTS = "SHOAL_MAX_RESTARTS", "SHOAL_MIN_HOSTS"
"""The variables with how often a job may restart, and with how many hosts an elastic job goes on."""
SHM_SIZE = "1g"
"""The default size of a host's /dev/shm."""


@dataclass(frozen=True)
class JobSpec:
    """A training job, as the user describes it, for any place that can run it.

    The options of a command fill it, the record keeps it, the hosts take it, and the report shows it.
    """

    source: Path | str | None = None
    """The directory with the script, or an address; None: the image has the code, and names the script."""
    entry_point: str | None = None
    """The script, relative to `source`."""
    arguments: tuple[str, ...] = ()
    """Arguments for the script, which follow its hyperparameters unchanged."""
    image: str = ""
    """A tag, or a framework from buildspec.yml."""
    hosts: int = 1
    procs_per_host: int | None = None
    hyperparameters: Mapping[str, str] = field(default_factory=dict)
    """The script's own hyperparameters; values that are valid JSON are passed on as JSON."""
    distribution: Mapping[str, Any] = field(default_factory=dict)
    """The `distribution` argument of a SageMaker estimator."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables for every host."""
    taken: Mapping[str, Path | None] = field(default_factory=dict)
    """The names of `environment` with values that no record and no pod has, each with its file of `--env-file`, or
    None: from the environment of the command."""
    include: tuple[str, ...] = ()
    """Patterns of files in the source that would be left out."""
    follow_links: bool = False
    """Whether links out of the source are replaced by a copy of their target."""
    shm_size: str | None = None
    """Such as 512m or 2g, per host; None: `SHM_SIZE`."""
    memory: str | None = None
    """Such as 512m or 2g, per host; None: no limit."""
    max_restarts: int = 0
    """How often `train` may start the script again after a lost rank or host."""

    @property
    def selection(self) -> Selection:
        """The source, and the options about it. Raises `UsageError` if the job has no source on this machine."""
        if not isinstance(self.source, Path):
            raise UsageError("SCRIPT: missing: no directory of this machine has the code. Fix: name SCRIPT after IMAGE")
        return Selection(self.source, self.entry_point, self.follow_links, self.include, self.results_places)

    @property
    def results_places(self) -> tuple[Path, ...]:
        """The directories of results, which a source leaves out."""
        return (Path("jobs"),)

    @property
    def train_command(self) -> list[str]:
        """The command of each host: `train` with the arguments for the script, of which it parses none."""
        return ["train", "--", *self.arguments] if self.arguments else ["train"]

    @property
    def launch(self) -> dict[str, Any]:
        """`distribution` with the ranks of `procs_per_host`. Raises `UsageError` if they contradict each other."""
        return distribution.set_processes_per_host(self.distribution, self.procs_per_host)

    @property
    def launch_parameters(self) -> dict[str, Any]:
        """The hyperparameters by which `train` selects the launcher. Raises `UsageError` if `distribution` is wrong."""
        return distribution.convert_distribution(self.launch)

    def encode_hyperparameters(self, job_name: str) -> dict[str, str]:
        """Returns the content of hyperparameters.json: each value is encoded as JSON, as the SageMaker SDK does.

        Hyperparameters for `train` replace own ones of the same name. Raises `UsageError` if `distribution` is wrong,
        or contradicts `procs_per_host`.
        """
        program = {"sagemaker_program": self.entry_point} if self.entry_point else {}
        reserved = {**program, "sagemaker_job_name": job_name, **self.launch_parameters}
        own = {key: _encode_value(value) for key, value in self.hyperparameters.items()}
        return own | distribution.encode_values(reserved)


@dataclass(frozen=True)
class JobRequest(JobSpec):
    """A job for this machine: in Docker, or without it."""

    source: Path | None = None
    engine: str = DOCKER
    channels: Mapping[str, Path] = field(default_factory=dict)
    """Local directories with input data, by channel."""
    secrets: tuple[Secret, ...] = ()
    """Files with secrets for every host."""
    output: Path = Path("jobs")
    """The directory in which the job's own directory is made."""
    cpus: float | None = None
    """Processor cores per host; None: no limit."""
    volumes: tuple[Volume, ...] = ()
    """Files and directories for every host."""
    gpus: str | None = None
    """`all`, `none`, or indexes or UUIDs separated by commas; None: not specified."""
    checkpoints: Path | None = None
    """The directory from which /opt/ml/checkpoints is filled, and to which it is collected; None: in the job's own."""
    min_hosts: int = 0
    """The number of hosts with which an elastic job goes on; 0: the job needs all hosts."""

    def check(self) -> None:
        """Raises `UsageError` if the job cannot run: a path, size, channel, GPU, secret or distribution is wrong."""
        if self.source is not None and self.entry_point is not None:
            check_source(self.selection)
        elif self.source is not None or not (self.entry_point or "-m ").startswith("-m "):
            missing = "--source" if self.source is None else "--entry-point"
            raise UsageError(f"{missing}: missing. Fix: give both, or SCRIPT instead of both")
        for option, place in {"--output": self.output, "--checkpoints": self.checkpoints}.items():
            check_no_address(option, place)
        check_size("--shm-size", self.shm_size)
        check_size("--memory", self.memory)
        for volume in self.volumes:
            volume.check()
        for name, directory in self.channels.items():
            check_channel_name(name)
            check_channel_directory(name, directory)
        self._check_links()
        self._check_checkpoints()
        if MAX_RESTARTS in self.environment:
            raise UsageError(f"--env {MAX_RESTARTS}: hosts would not be replaced. Fix: --max-restarts N")
        if MIN_HOSTS in self.environment:
            raise UsageError(f"--env {MIN_HOSTS}: shoal would not know it. Fix: --hosts MIN:MAX")
        self._check_elastic()
        gpus.check_gpus_option(self.gpus, self.hosts)
        check_secret(self.environment)
        check_secret_variables(self.secrets, self.environment)
        self.encode_hyperparameters("")

    def _check_links(self) -> None:
        """Raises `UsageError` if a link takes a directory of the job out of the current project."""
        options = {"--output": self.output, "--checkpoints": self.checkpoints}
        channels = {f"--channel {name}": directory for name, directory in self.channels.items()}
        volumes = {f"--volume {volume.source}:{volume.target}": volume.source for volume in self.volumes}
        for option, place in {**options, **channels, **volumes}.items():
            if place:
                check_place(option, place)

    def _check_checkpoints(self) -> None:
        if self.checkpoints is None:
            return
        channels = {f"--channel {name}": directory for name, directory in self.channels.items()}
        for option, place in {"--source": self.source, "--output": self.output, **channels}.items():
            if place and place.resolve().is_relative_to(self.checkpoints.resolve()):
                raise UsageError(
                    f"--checkpoints {self.checkpoints}: contains {option} ({place}), and the job replaces it as a"
                    " whole. Fix: name a directory only for checkpoints"
                )

    def _check_elastic(self) -> None:
        if not self.min_hosts:
            return
        option = f"--hosts {self.min_hosts}:{self.hosts}"
        if self.min_hosts > self.hosts:
            raise UsageError(
                f"{option}: the least number of hosts is first. Fix: --hosts {self.hosts}:{self.min_hosts}"
            )
        if not self.max_restarts:
            raise UsageError(f"{option}: a lost host would end the job. Fix: add --max-restarts N, such as 10")
        if distribution.has_stages(self.distribution):
            raise UsageError(
                f"{option}: the job is a pipeline, which needs all of its stages. Fix: --hosts {self.hosts}, and"
                " --max-restarts replaces lost hosts"
            )

    @property
    def host_names(self) -> list[str]:
        """algo-1, algo-2 and so on, one for each host."""
        return [f"algo-{number}" for number in range(1, self.hosts + 1)]

    @property
    def script_variables(self) -> dict[str, str]:
        """The variable that names the script, and the one that names the user's variables for job.json.

        The first overrides an image's own `ENV SAGEMAKER_PROGRAM`. It is missing if the image has the code.
        """
        names = [name for name in self.environment if name not in self.taken]
        reported = {REPORTED_VARIABLES: " ".join(names)} if names else {}
        if self.entry_point is None:
            return reported
        return {"SAGEMAKER_PROGRAM": self.entry_point, **reported}

    @property
    def asks_for_ranks(self) -> bool:
        """Whether a launcher starts ranks on each host, not the script once."""
        return any(value is True for value in self.launch_parameters.values())

    @property
    def results_places(self) -> tuple[Path, ...]:
        """The directories of results and checkpoints, which a source leaves out."""
        return tuple(path for path in (self.output, self.checkpoints) if path)

    def encode_hyperparameters(self, job_name: str) -> dict[str, str]:
        """Returns the content of hyperparameters.json, with those that SageMaker adds on its own machines."""
        code = {"sagemaker_submit_directory": "/opt/ml/code"} if self.entry_point else {}
        platform = {**code, "sagemaker_container_log_level": 20, "sagemaker_region": "us-west-2"}
        return super().encode_hyperparameters(job_name) | distribution.encode_values(platform)


@dataclass(frozen=True)
class FinishedJob:
    """How a job ended."""

    name: str
    exit_code: int
    """The exit code of the first host that failed, or 0."""
    directory: Path
    """The directory with the job's files."""
    archives: Mapping[str, Path]
    """model.tar.gz and output.tar.gz, if the job wrote files for them."""
    launch: Mapping[str, Any]
    """The report of `train` about the launch (output/job.json of the first host); empty if there is none."""
    metrics: Mapping[str, Any]
    """Last finite values of metrics in the log, of the lowest rank. Values in output/data/metrics.json replace them."""
    messages: Mapping[str, str]
    """By host, its failure file and other problems."""
    restarts: Sequence[Mapping[str, Any]] = ()
    """The restarts of the job: number, time (`at`), reason, host or rank, and seconds."""
    plan: Mapping[str, Any] = field(default_factory=dict)
    """The plan of `train` with masked secrets, as `train --explain --json` prints it; empty if there is none."""
    report: Path | None = None
    """The page about the job; None if it was not written."""
    checkpoints: Path | None = None
    """The directory with its checkpoints; None if it has none."""
    lost_files: tuple[str, ...] = ()
    """Files beside the code that went with the containers, if the script has saved no model."""
    build_seconds: float | None = None
    """The seconds of `--build`; None if there was none."""
    trackers: Mapping[str, str] = field(default_factory=dict)
    """For each experiment tracker with runs in the output, the command that shows them."""
    not_finite: Mapping[str, str] = field(default_factory=dict)
    """Metrics in the log with a last value that is NaN or infinite, with this value: the training may have diverged."""


def check_source(selection: Selection) -> None:
    """Raises `UsageError` unless the directory exists and has the script. A module (`-m NAME`) is not looked for."""
    source, script = selection.directory, selection.script
    check_no_address("--source", source)
    if not source.is_dir():
        problem = "not a directory" if source.exists() else "no such directory"
        raise UsageError(f"--source {source}: {problem}. Fix: name the directory of the script")
    source_files.check_directory(selection)
    # `-m module`, and scripts that requirements install, can only be checked in the container.
    if script.startswith(("/", "../")):
        raise UsageError(
            f"--entry-point {selection.entry_point}: not in --source {source}. Fix: a path relative to the source, or"
            " --source with a directory above the script"
        )
    if script and not (source / script).exists():
        names = sorted(path.name for path in source.iterdir())
        hint = did_you_mean(script, names)
        raise UsageError(
            f"--entry-point {selection.entry_point}: not in {source}.{hint} It contains: {', '.join(names)}."
            " Fix: name one of them"
        )


def make_secret(environment: Mapping[str, str]) -> str | None:
    """Returns the secret for a job: the one in its environment, otherwise 256 new random bits in hexadecimal.

    None if the environment names a file with the secret, which the hosts already have.
    """
    return None if SECRET_FILE in environment else environment.get(SECRET) or secrets.token_hex(32)


def share_cpus(request: JobRequest, cpus: int) -> dict[str, str]:
    """Returns the variable that limits each of several hosts to its share of the CPUs of their one machine.

    Otherwise the ranks of each host would use all of them, and training can take several times as long. Empty if the
    user limits the hosts.
    """
    return {} if request.cpus else {"SHOAL_CPUS": str(max(1, cpus // request.hosts))}


def check_secret(environment: Mapping[str, str]) -> None:
    """Raises `UsageError` if an environment has a secret that `train` refuses. No secret is right too.

    `train` refuses a secret that is too short or too long, and one beside the name of a file with the secret.
    """
    secret = environment.get(SECRET)
    if secret is None:
        return
    if SECRET_FILE in environment:
        raise UsageError(f"--env {SECRET} and {SECRET_FILE}: `train` refuses both. Fix: leave out one")
    if len(secret.strip()) not in _SECRET_LENGTHS:
        raise UsageError(
            f"--env {SECRET}: `train` takes {_SECRET_LENGTHS[0]} to {_SECRET_LENGTHS[-1]} characters. Fix: leave it "
            "out, and the job gets a new secret"
        )


def limit_variables(most: int, least_hosts: int = 0) -> dict[str, str]:
    """Returns the variables with the limit of restarts and the least number of hosts; none for 0, `train`'s default."""
    return {name: str(value) for name, value in ((MAX_RESTARTS, most), (MIN_HOSTS, least_hosts)) if value}


def check_size(option: str, size: str | None) -> int:
    """Returns a size such as 512m or 2g in bytes, 0 for None. Raises `UsageError`, also for a size of 0."""
    if size is None:
        return 0
    expected = f"{option} {size}: expected a size such as 512m or 2g. Fix: {option} 2g"
    try:
        count = int(docker.utils.parse_bytes(size))
    except (docker.errors.DockerException, ValueError, OverflowError) as error:
        raise UsageError(expected) from error
    if count <= 0:
        raise UsageError(expected)
    return count


def check_channel_directory(name: str, directory: Path) -> None:
    """Raises `UsageError`, with a fix, if a channel's directory is an address, a file or missing."""
    if directory.is_dir():
        return
    check_no_address(f"--channel {name}", directory)
    if directory.exists():
        raise UsageError(f"--channel {name}={directory}: a file. Fix: give its directory, {directory.parent}")
    if directory.is_symlink():
        missing = f"a link to {directory.readlink()}, which does not exist"
        raise UsageError(f"--channel {name}={directory}: {missing}. Fix: give the directory with the data")
    near = [path.name for path in directory.parent.iterdir()] if directory.parent.is_dir() else []
    hint = did_you_mean(directory.name, near)
    raise UsageError(f"--channel {name}={directory}: no such directory.{hint} Fix: give the directory with the data")


def check_no_address(option: str, place: Path | None) -> None:
    """Raises `UsageError` if the path in an option is an address, such as s3://bucket."""
    if address := re.match(r"(\w+):/+", str(place)):  # a Path has dropped one slash
        fix = "leave out file://" if address[1] == "file" else "name a directory, and copy its files yourself"
        raise UsageError(f"{option}: {address[1]}:// is not supported, only a directory of this machine. Fix: {fix}")


def check_channel_name(name: str) -> None:
    """Raises `UsageError` unless the name can be a channel's."""
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", name) or name in (".", ".."):
        raise UsageError(
            f"--channel {name!r}: a name may have only letters, digits, '_', '.' and '-', as it names a directory."
            " It cannot be '.' or '..'. Fix: such as --channel training=DIR"
        )


def _encode_value(text: str) -> str:
    try:
        json.loads(text)
    except ValueError:
        return json.dumps(text)
    return text


def describe_channels(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Returns the content of inputdataconfig.json."""
    return {
        name: {"TrainingInputMode": "File", "S3DistributionType": "FullyReplicated", "RecordWrapperType": "None"}
        for name in names
    }


def make_job_name(stem: str) -> str:
    """Returns a unique name: letters and digits of `stem`, the time and a few random characters."""
    # Both Docker and SageMaker accept letters, digits and hyphens.
    return containers.unique_name(re.sub(r"[^A-Za-z0-9]+", "-", stem).strip("-") or "job")


def make_job_directory(request: JobRequest, name: str) -> Path:
    """Creates the directory for the job's files under `request.output`, and returns it. Raises `UsageError`.

    Only this user can enter it: the files of a job may have secrets.
    """
    directory = (request.output / name).resolve()
    try:
        directory.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise UsageError(
            f"--output {request.output}: {directory} cannot be created: {error.strerror}. Fix: another --output"
        ) from error
    return directory


def write_tree(root: Path, request: JobRequest, job_name: str, mode: int = 0o600) -> None:
    """Writes the tree that SageMaker mounts at /opt/ml: code, configuration and empty output directories.

    `RESOURCE_CONFIG` is missing, as it differs between hosts. Channels are not copied: the caller mounts or links them
    at input/data/<channel>. Without a source there is no directory `code`. Only this user can enter the tree.

    Args:
        root: The directory that becomes /opt/ml.
        job_name: The name of `make_job_name`.
        mode: The permissions of the configuration, which may have secrets.

    Raises:
        UsageError: If the source directory cannot be copied.
    """
    root.mkdir(mode=0o700, exist_ok=True)
    if request.source is not None:
        source_files.copy_source(request.selection, root / "code")
    for directory in ("input/config", "input/data", "model", "output/data", "checkpoints"):
        (root / directory).mkdir(parents=True)
    for name, content in (
        ("hyperparameters.json", request.encode_hyperparameters(job_name)),
        ("inputdataconfig.json", describe_channels(request.channels)),
    ):
        write_private(root / "input" / "config" / name, json.dumps(content).encode(), mode)


def write_private(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Writes a new file, which at no moment has more permissions than `mode`."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)


def encode_resource_config(hosts: Sequence[str], current_host: str, interface: str = "eth0") -> bytes:
    """Returns the content of resourceconfig.json for the host `current_host`."""
    document = {
        "current_host": current_host,
        "hosts": list(hosts),
        "network_interface_name": interface,
        "current_instance_type": "local",
    }
    return json.dumps(document).encode()
