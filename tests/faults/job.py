"""A job over containers of the built image, and how each of them ended: exit code, moment, files."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import docker
from docker.models.containers import Container

from ..containers import Host, write_tree
from . import scripts

SECONDS_AT_MOST = 90


class Launcher(NamedTuple):
    """A launcher, and the hyperparameters that ask for it."""

    name: str
    hyperparameters: Mapping[str, Any]

    def __str__(self) -> str:
        return self.name


PROCESS = Launcher("process", {})
MPI = Launcher("MPI", {"sagemaker_mpi_enabled": True})
TORCHRUN = Launcher("torchrun", {"sagemaker_torch_distributed_enabled": True})


class End(NamedTuple):
    """How one host's container ended."""

    code: int
    at: float  # by Docker's clock, the one of this machine
    failure: str  # the failure file; empty when there is none
    success: bool
    output: str


class Use(NamedTuple):
    """The memory and time that `train` itself uses."""

    memory: int  # bytes at most
    cpu: float  # cores


class Job:
    """A running job, by its containers. They have the names of the hosts, unless two claim one name."""

    def __init__(self, client: docker.DockerClient, image: str, launcher: Launcher) -> None:
        self.client, self.image, self.launcher = client, image, launcher
        self.hosts: dict[str, Host] = {}

    def container(self, name: str) -> Container:
        return self.hosts[name].engines

    def up(self, ranks: int = 2) -> float:
        """Wait until every rank runs the script; returns when the last of them came."""
        return max(self.marks("up", ranks).values())

    def marks(self, event: str, ranks: int) -> dict[int, float]:
        """Waits until that many ranks have marked an event; returns when each of them did."""
        found: dict[int, float] = {}

        def all_there() -> bool:
            found.update(self._marks(event))
            return len(found) >= ranks

        until(all_there, lambda: f"{event} of {ranks} ranks: {found}\n{self.logs()}")
        return found

    def _marks(self, event: str) -> Iterator[tuple[int, float]]:
        for host in self.hosts.values():
            for path in host.path("checkpoints").glob(f"{event}.*"):
                yield int(path.suffix[1:]), float(path.read_text())

    def printed(self, name: str, text: str) -> None:
        """Wait until a container has printed something."""
        until(lambda: text.encode() in self.container(name).logs(), lambda: f"{text!r} in\n{self.logs()}")

    def started(self, name: str) -> float:
        """Return when a container was started."""
        container = self.container(name)
        container.reload()
        return moment(container.attrs["State"]["StartedAt"])

    def out_of_memory(self, name: str) -> float:
        """Wait until the kernel has killed something in a container for lack of memory; returns when."""
        filters = {"container": self.container(name).id, "event": "oom"}
        until = int(time.time() + SECONDS_AT_MOST)
        events = self.client.events(since=0, until=until, filters=filters, decode=True)
        return float(next(events)["timeNano"]) / 1e9

    def use(self, name: str, seconds: float) -> Use:
        """Measure what `train` uses on a host, over some seconds."""
        code, output = run_inside(self.container(name), "python", "-c", scripts.USE, str(seconds))
        assert code == 0, output
        memory, cpu = json.loads(output)
        return Use(memory, cpu / seconds)

    def ends(self, names: Sequence[str] = ()) -> dict[str, End]:
        """Wait until these containers have ended, or all."""
        return {name: _end(self.hosts[name]) for name in names or self.hosts}

    def logs(self) -> str:
        return "\n".join(f"{name}: {self.container(name).logs(tail=40).decode()}" for name in self.hosts)

    # Faults

    def kill(self, name: str, program: str) -> float:
        """Kill the processes of a program in a container (which may end with it); returns when."""
        return send(self.container(name), program, signal.SIGKILL)

    def cut(self, name: str, seconds: float = 0) -> float:
        """Take a host's network down, for some seconds or (0) for good; returns when that began."""
        return self._on_wire(name, scripts.CUT, str(seconds))

    def mislead(self, name: str, other: str) -> float:
        """Loses all packets from one host to another from now on; returns when that began."""
        return self._on_wire(name, scripts.MISLEAD, other)

    def _on_wire(self, name: str, program: str, argument: str) -> float:
        """Run a program with the right to change a host's network; returns the moment that it prints."""
        command, network = ["python", "-c", program, argument], f"container:{self.container(name).id}"
        output = self.client.containers.run(
            self.image, command, network_mode=network, cap_add=["NET_ADMIN"], remove=True
        )
        return float(output.split()[0])


def lay_out(
    tree: Path,
    script: str,
    launcher: Launcher,
    ranks: int,
    hosts: Sequence[str],
    current: str,
    hyperparameters: Mapping[str, Any],
) -> None:
    """Write one host's base directory."""
    values = {**launcher.hyperparameters, **hyperparameters}
    if launcher is not PROCESS:
        values["sagemaker_mpi_num_of_processes_per_host"] = ranks
    write_tree(tree, script, values, tuple(hosts), current)
    (tree / "checkpoints").mkdir()


def until(happened: Callable[[], bool], what: Callable[[], str], seconds: float = SECONDS_AT_MOST) -> None:
    """Wait for something; says what is missing when it does not come."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, what()
        time.sleep(0.05)


def _end(host: Host) -> End:
    ended = host.wait(SECONDS_AT_MOST)
    host.engines.reload()
    failure = host.path("output/failure")
    return End(
        ended.code,
        moment(host.engines.attrs["State"]["FinishedAt"]),
        failure.read_text() if failure.exists() else "",
        host.path("output/success").exists(),
        ended.output,
    )


def run_inside(container: Container, *command: str) -> tuple[int, str]:
    """Runs a command in a running container; returns its exit code and its output."""
    code, output = container.exec_run(list(command))
    assert isinstance(output, bytes)
    return int(code or 0), output.decode()


def send(container: Container, program: str, number: int) -> float:
    """Signal the processes of a program in a container; returns when."""
    _, output = run_inside(container, "python", "-c", scripts.SIGNAL, program, str(number))
    return float(output.split()[0])


def moment(text: str) -> float:
    """Returns Docker's time stamp in seconds. It has nanoseconds; Python reads microseconds."""
    return datetime.fromisoformat(text[:26].rstrip("Z")).replace(tzinfo=timezone.utc).timestamp()
