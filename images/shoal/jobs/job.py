"""A training job as the host sees it: what is asked for, the /opt/ml tree of each host, and what comes back."""

from __future__ import annotations

import json
import re
import secrets
import shutil
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import docker.errors
import docker.utils

from shoal.docker_client import containers
from shoal.errors import UsageError, did_you_mean
from shoal.jobs import distribution, gpus

SECRET, SECRET_FILE = "SHOAL_JOB_SECRET", "SHOAL_JOB_SECRET_FILE"
"""The variables of which `train` takes one: what hosts of a job prove to each other, or a file with it."""
RESOURCES = "input/config/resourceconfig.json"
"""The one file of the tree that differs between hosts."""
SHM_SIZE = "1g"
"""/dev/shm of a host, unless the user asks for another size."""


@dataclass(frozen=True)
class JobRequest:
    """What the user asks for.

    `channels` maps channel names to directories of this machine; `hyperparameters` are the script's own, as they were
    given; `environment` goes into every host; `shm_size` and `memory` (None: no limit) are sizes in Docker's notation;
    `gpus` is `all`, `none` or names separated by commas, None where it is not given.
    """

    source: Path
    entry_point: str
    hosts: int = 1
    procs_per_host: int | None = None
    channels: Mapping[str, Path] = field(default_factory=dict)
    hyperparameters: Mapping[str, str] = field(default_factory=dict)
    distribution: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    output: Path = Path("jobs")
    shm_size: str = SHM_SIZE
    memory: str | None = None
    gpus: str | None = None

    def check(self) -> None:
        """Raise `UsageError` for a source, entry point, channel or distribution that cannot run."""
        if not self.source.is_dir():
            problem = "not a directory" if self.source.exists() else "no such directory"
            raise UsageError(f"--source {self.source}: {problem}")
        # `-m module` and files that requirements install are the container's to judge.
        if not self.entry_point.startswith("-m ") and not (self.source / self.entry_point).exists():
            names = sorted(path.name for path in self.source.iterdir())
            hint = did_you_mean(self.entry_point, names)
            raise UsageError(
                f"--entry-point {self.entry_point}: not in {self.source}.{hint} It holds: {', '.join(names)}"
            )
        for option, size in (("--shm-size", self.shm_size), ("--memory", self.memory)):
            try:
                docker.utils.parse_bytes(size or 0)
            except docker.errors.DockerException as error:
                raise UsageError(f"{option} {size}: expected a size such as 512m or 2g") from error
        for name, directory in self.channels.items():
            if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
                raise UsageError(f"--channel {name!r}: a name has letters, digits, '_', '.' and '-' only")
            if not directory.is_dir():
                raise UsageError(f"--channel {name}={directory}: no such directory")
        gpus.check(self.gpus, self.hosts)
        self.encoded_hyperparameters("")

    @property
    def host_names(self) -> list[str]:
        return [f"algo-{number}" for number in range(1, self.hosts + 1)]

    @property
    def script_variables(self) -> dict[str, str]:
        """What names the script in every host; an image that extends ours may name another (ENV SAGEMAKER_PROGRAM)."""
        return {"SAGEMAKER_PROGRAM": self.entry_point}

    def secret(self) -> str | None:
        """Return the job's secret: the one that `--env` gives, else a new one of 256 random bits.

        None if `--env` names a file with it, which is then there already.
        """
        return None if SECRET_FILE in self.environment else self.environment.get(SECRET) or secrets.token_hex(32)

    def encoded_hyperparameters(self, job_name: str) -> dict[str, str]:
        """Return hyperparameters.json's content: every value JSON-encoded once more, as the SDK sends it."""
        launch = distribution.with_processes_per_host(self.distribution, self.procs_per_host)
        own = {key: _encode_value(value) for key, value in self.hyperparameters.items()}
        reserved = {
            "sagemaker_submit_directory": "/opt/ml/code",
            "sagemaker_program": self.entry_point,
            "sagemaker_container_log_level": 20,
            "sagemaker_job_name": job_name,
            "sagemaker_region": "us-west-2",
        }
        return own | distribution.encode(reserved | distribution.hyperparameters(launch))


def _encode_value(text: str) -> str:
    """Return `text` as JSON: as it is where it is JSON already (0.1, true, {"a": 1}), else as a JSON string."""
    try:
        json.loads(text)
    except ValueError:
        return json.dumps(text)
    return text


def new_name(request: JobRequest) -> str:
    """Return a name no other job has: the source directory's name, the time, a few random characters."""
    # Docker's names and SageMaker's: letters, digits and hyphens.
    stem = re.sub(r"[^A-Za-z0-9]+", "-", request.source.resolve().name).strip("-") or "job"
    return containers.unique_name(stem)


def make_directory(request: JobRequest, name: str) -> Path:
    """Make the directory of the job's results, before anything is started that has some. Raises `UsageError`."""
    directory = (request.output / name).resolve()
    try:
        directory.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"--output {request.output}: {directory} cannot be made: {error.strerror}") from error
    return directory


def write_tree(root: Path, request: JobRequest, job_name: str) -> None:
    """Lay out the tree that SageMaker mounts at /opt/ml, without `RESOURCES`: code, configuration, output directories.

    Channels are not copied; whoever starts the host makes `input/data/<channel>` appear. Raises `UsageError` when the
    source cannot be copied.
    """
    try:
        shutil.copytree(request.source, root / "code", ignore=_not_code(request.output.resolve()))
    except (OSError, shutil.Error) as error:
        raise UsageError(f"--source {request.source}: cannot be copied: {error}") from error
    for directory in ("input/config", "input/data", "model", "output/data", "checkpoints"):
        (root / directory).mkdir(parents=True)
    inputs = {
        name: {"TrainingInputMode": "File", "S3DistributionType": "FullyReplicated", "RecordWrapperType": "None"}
        for name in request.channels
    }
    for name, document in (
        ("hyperparameters", request.encoded_hyperparameters(job_name)),
        ("inputdataconfig", inputs),
    ):
        (root / "input" / "config" / f"{name}.json").write_text(json.dumps(document))


def resources(request: JobRequest, current_host: str) -> bytes:
    """Return resourceconfig.json as `current_host` sees it."""
    document = {
        "current_host": current_host,
        "hosts": request.host_names,
        "network_interface_name": "eth0",
        "current_instance_type": "local",
    }
    return json.dumps(document).encode()


def _not_code(output: Path) -> Callable[[str, list[str]], set[str]]:
    """Leave out caches, and the results of earlier jobs where they lie inside the source."""
    caches = shutil.ignore_patterns("__pycache__", ".git")

    def ignore(directory: str, names: list[str]) -> set[str]:
        return caches(directory, names) | {name for name in names if (Path(directory) / name).resolve() == output}

    return ignore


def collect(directory: Path, trees: Mapping[str, Path]) -> dict[str, Path]:
    """Pack model/ and output/data/ of all hosts' trees into model.tar.gz and output.tar.gz; return those made.

    The same path on several hosts is taken from the first of them. A part without files makes no archive.
    """
    archives = {}
    for name, part in (("model.tar.gz", "model"), ("output.tar.gz", "output/data")):
        files: dict[str, Path] = {}
        for tree in trees.values():
            for path in sorted((tree / part).rglob("*")):
                if path.is_file():
                    files.setdefault(str(path.relative_to(tree / part)), path)
        if files:
            archives[name] = directory / name
            with tarfile.open(archives[name], "w:gz", compresslevel=6) as archive:
                for arcname, path in sorted(files.items()):
                    archive.add(path, arcname)
    return archives


@dataclass(frozen=True)
class Outcome:
    """How a job ended: the exit code that every host gave (or the first failing one), where its files lie, and facts.

    `launch` is what `train` wrote of itself (output/job.json of the first host), `metrics` is output/data/metrics.json
    where the script wrote one; both are empty where there is none. `messages` are, by host, the failure files and what
    else went wrong.
    """

    name: str
    exit_code: int
    directory: Path
    archives: Mapping[str, Path]
    launch: Mapping[str, Any]
    metrics: Mapping[str, Any]
    messages: Mapping[str, str]


def outcome(
    name: str,
    exit_codes: Mapping[str, int],
    directory: Path,
    trees: Mapping[str, Path],
    notes: Mapping[str, str] | None = None,
) -> Outcome:
    """Read what the hosts left behind. `notes` are words on hosts that ended badly."""
    first_host, first = next(iter(trees.items()))
    messages = dict(notes or {})
    for host, tree in trees.items():
        if (failure := tree / "output" / "failure").is_file():
            messages[host] = "\n".join([*filter(None, [messages.get(host)]), failure.read_text(errors="replace")])
    facts = {}
    for part, read in (("job.json", _read_launch), ("data/metrics.json", _read_object)):
        try:
            facts[part] = read(first / "output" / part)
        except ValueError as error:
            facts[part] = {}
            messages[first_host] = "\n".join([*filter(None, [messages.get(first_host)]), f"output/{part}: {error}"])
    return Outcome(
        name=name,
        exit_code=next((code for code in exit_codes.values() if code), 0),
        directory=directory,
        archives=collect(directory, trees),
        launch=facts["job.json"],
        metrics=facts["data/metrics.json"],
        messages=messages,
    )


def _read_object(path: Path) -> dict[str, Any]:
    try:
        # Python writes NaN and Infinity, which no other reader of `--json` takes for JSON: they become texts.
        document = json.loads(path.read_text(), parse_constant=str)
    except FileNotFoundError:
        return {}
    except RecursionError:
        raise ValueError("too deep") from None
    if not isinstance(document, dict):
        raise ValueError("not a JSON object")
    return document


def _read_launch(path: Path) -> dict[str, Any]:
    """Read what `train` writes of itself; any program of the image may have written it since."""
    found = _read_object(path)
    hosts, ranks = found.get("hosts", [path]), found.get("ranks")
    seconds = (found.get("launch_seconds"), found.get("training_seconds"))
    if not (isinstance(hosts, list) and hosts and (ranks is None or type(ranks) is int)):
        raise ValueError("not what `train` writes: hosts, ranks")
    if not all(value is None or isinstance(value, (int, float)) for value in seconds):
        raise ValueError("not what `train` writes: seconds")
    return found
