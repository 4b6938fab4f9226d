"""Training containers to be timed: created with their /opt/ml, started, waited for, and removed."""

from __future__ import annotations

import json
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from docker.models.containers import Container

SECONDS_AT_MOST = 300
CODE = "/opt/ml/code"
# The stock toolkit's own training code, without a framework toolkit, which imports its framework first.
WITHOUT_FRAMEWORK = {"SAGEMAKER_TRAINING_MODULE": ""}


class Job(NamedTuple):
    """A job through `train`. ranks: on each host; 0 means the script alone, without MPI."""

    image: str
    script: str
    hosts: int = 1
    ranks: int = 0
    exit_code: int | None = 0  # None: any

    @property
    def names(self) -> list[str]:
        return [f"algo-{number + 1}" for number in range(self.hosts)]


class Ran(NamedTuple):
    """A job that has ended: times of its containers, /opt/ml/output of each host, and when it was requested."""

    started: list[float]
    finished: list[float]
    outputs: list[dict[str, str]]
    requested: float

    @property
    def reports(self) -> list[dict[str, Any]]:
        """Our toolkit's output/job.json of each host."""
        return [json.loads(output["job.json"]) for output in self.outputs]

    @property
    def span(self) -> float:
        """From the start of the last container (or of its `train`, if that is known) to the end of all.

        Docker notes a start a little late.
        """
        own = [float(json.loads(output.get("job.json", "{}")).get("began", "inf")) for output in self.outputs]
        return max(self.finished) - max(min(pair) for pair in zip(self.started, own, strict=True))


def run(client: Any, job: Job) -> Ran:
    """Run a job to its end, and remove it. Raises SystemExit if it ends with another exit code."""
    secret = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as directory, ExitStack() as undo:
        net = undo.enter_context(network(client)) if job.hosts > 1 else None
        trees = [write_tree(Path(directory) / name, job, name) for name in job.names]
        containers = [
            create(client, job.image, tree, undo, net, name, {"SHOAL_JOB_SECRET": secret, **WITHOUT_FRAMEWORK})
            for name, tree in zip(job.names, trees, strict=True)
        ]
        requested = datetime.now(timezone.utc).timestamp()
        for container in reversed(containers):
            container.start()
        wait(containers, job.exit_code)
        return Ran(
            started=[moment(container, "StartedAt") for container in containers],
            finished=[moment(container, "FinishedAt") for container in containers],
            outputs=[read_files(tree / "output") for tree in trees],
            requested=requested,
        )


def write_tree(base: Path, job: Job, current: str) -> Path:
    """Write a job's /opt/ml."""
    for directory in ("input/config", "code", "model", "output/data"):
        (base / directory).mkdir(parents=True)
    (base / "code" / "script.py").write_text(job.script)
    mpi = {"sagemaker_mpi_enabled": "true", "sagemaker_mpi_num_of_processes_per_host": str(job.ranks)}
    configuration: Mapping[str, object] = {
        "hyperparameters": {"sagemaker_program": '"script.py"', **(mpi if job.ranks else {})},
        "resourceconfig": {"current_host": current, "hosts": job.names, "network_interface_name": "eth0"},
        "inputdataconfig": {},
    }
    for name, value in configuration.items():
        (base / "input" / "config" / f"{name}.json").write_text(json.dumps(value))
    return base


def read_files(directory: Path) -> dict[str, str]:
    """Return the texts of all files below a directory, by their path there."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): path.read_text(errors="replace") for path in files}


@contextmanager
def network(client: Any) -> Iterator[Any]:
    """A network for one job. It is internal, so that a name that does not exist yet is unknown at once."""
    made = client.networks.create(f"shoal-bench-{uuid.uuid4().hex[:12]}", internal=True)
    try:
        yield made
    finally:
        made.remove()


def create(
    client: Any,
    image: str,
    tree: Path,
    undo: ExitStack,
    net: Any,
    name: str,
    environment: Mapping[str, str],
    **options: Any,
) -> Container:
    """Create a container of `train`, or of the command in the options. It is removed when `undo` is closed."""
    api = client.api
    alias = {net.name: api.create_endpoint_config(aliases=[name])} if net else None
    made = api.create_container(
        image,
        **{"command": ["train"], **options},
        environment=environment,
        host_config=api.create_host_config(
            binds=[f"{tree}:/opt/ml"],
            network_mode=net.name if net else None,
            extra_hosts=None if net else {name: "127.0.0.1"},
            init=False,
        ),
        networking_config=api.create_networking_config(alias) if alias else None,
    )
    container: Container = client.containers.get(made["Id"])
    undo.callback(container.remove, force=True)
    return container


def wait(containers: Sequence[Container], exit_code: int | None = 0) -> None:
    """Wait for containers to end, with this exit code."""
    for container in containers:
        code = container.wait(timeout=SECONDS_AT_MOST)["StatusCode"]
        if exit_code is not None and code != exit_code:
            raise SystemExit(f"{container.name} ended with exit code {code}:\n{container.logs().decode()}")
        container.reload()


def moment(container: Container, event: str) -> float:
    """Return Docker's time stamp of an event. It has nanoseconds; Python takes microseconds."""
    text = container.attrs["State"][event]
    return datetime.fromisoformat(text[:26].rstrip("Z")).replace(tzinfo=timezone.utc).timestamp()
