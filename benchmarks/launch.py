"""How fast `train` launches in containers of an image: `make bench-launch`, or `launch.py IMAGE [ROUNDS]`.

Per round, one after the other, with a script that does nothing:

- `bare-mpirun`: `mpirun -np 2` of the same script in one container, without `train`: the floor;
- `launch-1host-2ranks` and `launch-2hosts-1rank`: jobs through `train`, as SageMaker starts them.

Time is from the start of the last container until all have ended (State.StartedAt and FinishedAt), so that the engine's
work on containers and networks does not count. The engine notes a start a little late: where `train` itself says in
output/job.json that it began earlier, that is taken. `with-engine` is the upper bound: from the request to start the
first container. `until-first-rank` is `launch_seconds` of job.json: from the start of the first host's `train`.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import docker
from docker.models.containers import Container
from report import Figure, finish, print_machine

from shoal import project
from shoal.spec import load

ROUNDS = 10
SECONDS_AT_MOST = 120
CODE = "/opt/ml/code"
MPIRUN = "mpirun --allow-run-as-root --oversubscribe -np 2 python -m mpi4py"


def main(arguments: Sequence[str]) -> int:
    """Measure the image, and return the exit code."""
    if not 1 <= len(arguments) <= 2:
        print("usage: python benchmarks/launch.py IMAGE [ROUNDS]", file=sys.stderr)
        return 2
    client = docker.from_env()
    image, rounds = resolve(arguments[0]), int(arguments[1]) if len(arguments) == 2 else ROUNDS
    print_machine()
    print(f"engine: {client.version()['Version']}, image: {image}, rounds: {rounds} (medians)")
    figures: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, seconds in one_round(client, image).items():
            figures.setdefault(name, []).append(seconds)
    median = {name: statistics.median(values) for name, values in figures.items()}
    for name, values in figures.items():
        print(f"{name}: {min(values):.3f} .. {max(values):.3f} s")
    return finish(
        [
            Figure("launch-1host-2ranks", median["1host"], "s", 0.5, median["bare-mpirun"], "bare-mpirun"),
            Figure("launch-2hosts-1rank", median["2hosts"], "s", 2),
            Figure("launch-1host-2ranks-with-engine", median["1host-with-engine"], "s"),
            Figure("launch-2hosts-1rank-with-engine", median["2hosts-with-engine"], "s"),
            Figure("until-first-rank-1host", median["1host-until-rank"], "s"),
            Figure("until-first-rank-2hosts", median["2hosts-until-rank"], "s"),
        ]
    )


def resolve(name: str) -> str:
    """Return the tag of an image: a tag as it is, else what the build specification has for that name."""
    return name if ":" in name else load(project.find(Path.cwd()).buildspec).select(name).tag


def one_round(client: Any, image: str) -> dict[str, float]:
    """Measure each job once."""
    return {
        "bare-mpirun": bare(client, image),
        **job(client, image, "1host", hosts=1, ranks=2),
        **job(client, image, "2hosts", hosts=2, ranks=1),
    }


def bare(client: Any, image: str) -> float:
    """Time mpirun alone."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as undo:
        tree = write_tree(Path(directory), ["algo-1"], "algo-1", ranks=2)
        command = ["sh", "-c", f"{MPIRUN} {CODE}/noop.py"]
        container = create(client, image, tree, undo, entrypoint="", command=command)
        container.start()
        return span([container], [float("inf")])


def job(client: Any, image: str, label: str, hosts: int, ranks: int) -> dict[str, float]:
    """Time a job through `train`."""
    names = [f"algo-{number + 1}" for number in range(hosts)]
    secret = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as directory, network(client) as net, ExitStack() as undo:
        trees = [write_tree(Path(directory) / name, names, name, ranks) for name in names]
        containers = []
        for name, tree in zip(names, trees, strict=True):
            joined = client.api.create_networking_config({net.name: client.api.create_endpoint_config(aliases=[name])})
            containers.append(create(client, image, tree, undo, networking=joined, network=net.name, secret=secret))
        asked = datetime.now(timezone.utc)
        for container in reversed(containers):
            container.start()
        wait(containers)
        reports = [json.loads((tree / "output" / "job.json").read_text()) for tree in trees]
        return {
            label: span(containers, [report["began"] for report in reports]),
            f"{label}-with-engine": max(moment(container, "FinishedAt") for container in containers)
            - asked.timestamp(),
            f"{label}-until-rank": float(reports[0]["launch_seconds"]),
        }


def write_tree(base: Path, hosts: list[str], current: str, ranks: int) -> Path:
    """Write a job's /opt/ml."""
    for directory in ("input/config", "code", "model", "output/data"):
        (base / directory).mkdir(parents=True)
    (base / "code" / "noop.py").write_text("")
    configuration: Mapping[str, object] = {
        "hyperparameters": {
            "sagemaker_program": '"noop.py"',
            "sagemaker_mpi_enabled": "true",
            "sagemaker_mpi_num_of_processes_per_host": str(ranks),
        },
        "resourceconfig": {"current_host": current, "hosts": hosts, "network_interface_name": "eth0"},
        "inputdataconfig": {},
    }
    for name, value in configuration.items():
        (base / "input" / "config" / f"{name}.json").write_text(json.dumps(value))
    return base


@contextmanager
def network(client: Any) -> Iterator[Any]:
    """A network of its own, gone afterwards."""
    made = client.networks.create(f"shoal-bench-{uuid.uuid4().hex[:12]}")
    try:
        yield made
    finally:
        made.remove()


def create(
    client: Any,
    image: str,
    tree: Path,
    undo: ExitStack,
    networking: Any = None,
    network: str | None = None,
    secret: str = "",
    **options: Any,
) -> Container:
    """Create a container of `train`, unless options say else, which is removed afterwards whatever happens."""
    host_config = client.api.create_host_config(binds=[f"{tree}:/opt/ml"], network_mode=network, init=False)
    made = client.api.create_container(
        image,
        **{"command": ["train"], **options},
        environment={"SHOAL_JOB_SECRET": secret} if secret else {},
        host_config=host_config,
        networking_config=networking,
    )
    container: Container = client.containers.get(made["Id"])
    undo.callback(container.remove, force=True)
    return container


def wait(containers: Sequence[Container]) -> None:
    """Wait for containers to end well."""
    for container in containers:
        code = container.wait(timeout=SECONDS_AT_MOST)["StatusCode"]
        if code:
            raise SystemExit(f"{container.name} ended with exit code {code}:\n{container.logs().decode()}")
        container.reload()


def span(containers: Sequence[Container], began: Sequence[float]) -> float:
    """Return the seconds from the start of the last container (or its `train`, if earlier) to the end of all."""
    wait(containers)
    starts = [min(moment(container, "StartedAt"), own) for container, own in zip(containers, began, strict=True)]
    return max(moment(container, "FinishedAt") for container in containers) - max(starts)


def moment(container: Container, event: str) -> float:
    """Return the engine's time stamp of an event: it has nanoseconds, of which Python takes the micros."""
    text = container.attrs["State"][event]
    return datetime.fromisoformat(text[:26].rstrip("Z")).replace(tzinfo=timezone.utc).timestamp()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
