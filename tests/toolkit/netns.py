"""Hosts of a job as network namespaces of this machine: own address, own names, own PID 1, own /dev/shm.

Two names of one machine will not do: mpirun would take both for itself.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from .conftest import TRAIN, Finished, Tree, clean_environment, make_tree

UNAVAILABLE = (
    ""
    if os.geteuid() == 0 and shutil.which("ip") and shutil.which("unshare")
    else "needs root, iproute2 and util-linux"
)
_PREFIX = "10.213.77"
_STRANGER = f"{_PREFIX}.99"
# A container's own name is none of the job's names, and its /dev/shm is its own. `train` becomes PID 1.
_ENTER = 'hostname "$0"; mount -t tmpfs tmpfs /dev/shm; exec "$@"'


class Host(NamedTuple):
    """One host: its name in the job, its namespace, its base directory."""

    name: str
    namespace: str
    tree: Tree
    address: str

    def command(self, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *words]

    def start(self, *arguments: str, train: Sequence[str] = TRAIN, **variables: str) -> subprocess.Popen[bytes]:
        """Start `train`, its output in files beside the tree."""
        environment = clean_environment(
            **{
                "SAGEMAKER_BASE_DIR": str(self.tree.base),
                "SAGEMAKER_PROGRAM": "train.py",
                "TMPDIR": str(self.temporary),
                **variables,
            }
        )
        isolated = ("unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
        command = self.command(*isolated, "sh", "-c", _ENTER, f"container-of-{self.name}", *train, *arguments)
        with self.file("out").open("wb") as out, self.file("err").open("wb") as err:
            return subprocess.Popen(command, env=environment, stdout=out, stderr=err)

    @property
    def temporary(self) -> Path:
        """Its own, as PIDs and host names repeat in other namespaces; with a short path, for the sockets in it."""
        return Path("/tmp") / self.namespace

    def file(self, stream: str) -> Path:
        return self.tree.base.parent / f"{self.name}.{stream}"

    def finished(self, process: subprocess.Popen[bytes], seconds: float = 60) -> Finished:
        code = process.wait(seconds)
        return Finished(code, self.file("out").read_text(), self.file("err").read_text())


def init_of(process: subprocess.Popen[bytes]) -> int:
    """The PID, out here, of a host's PID 1: the child of `unshare`."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(children[0])


def send(process: subprocess.Popen[bytes], number: int) -> None:
    """Signal a host's PID 1, as `docker stop` does."""
    os.kill(init_of(process), number)


@contextmanager
def two_hosts(directory: Path) -> Iterator[list[Host]]:
    """algo-1 and algo-2, joined by a wire."""
    with ExitStack() as undo:
        first, second = hosts = _make_hosts(directory, 2, undo)
        _ip("link", "add", "eth0", "netns", first.namespace, "type", "veth", "peer", "eth0", "netns", second.namespace)
        for host in hosts:
            _set_up(host)
        yield hosts


@contextmanager
def many_hosts(directory: Path, count: int) -> Iterator[list[Host]]:
    """algo-1 to algo-N, joined by a switch: a bridge in a namespace of its own."""
    with ExitStack() as undo:
        hosts = _make_hosts(directory, count, undo)
        switch = f"{hosts[0].namespace}-switch"
        _ip("netns", "add", switch)
        undo.callback(_ip, "netns", "delete", switch)
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        for host in hosts:
            port = host.name
            _ip("link", "add", "eth0", "netns", host.namespace, "type", "veth", "peer", port, "netns", switch)
            _ip("-n", switch, "link", "set", port, "master", "switch", "up")
            _set_up(host)
        yield hosts


def _make_hosts(directory: Path, count: int, undo: ExitStack) -> list[Host]:
    """Makes hosts without a network, which `undo` removes. Each knows the names of all."""
    unique = f"shoal{os.urandom(4).hex()}"  # a run that was killed leaves its names, and pids repeat
    hosts = [
        Host(f"algo-{n}", f"{unique}-{n}", make_tree(directory / f"algo-{n}" / "ml"), f"{_PREFIX}.{n}")
        for n in range(1, count + 1)
    ]
    names = "127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in hosts)
    for host in hosts:
        _ip("netns", "add", host.namespace)
        undo.callback(_ip, "netns", "delete", host.namespace)
        host.temporary.mkdir()
        undo.callback(shutil.rmtree, host.temporary)
        config = Path("/etc/netns") / host.namespace
        config.mkdir(parents=True)
        undo.callback(shutil.rmtree, config)
        (config / "hosts").write_text(names)
        host.tree.hosts(host.name, *(other.name for other in hosts), network_interface_name="eth0")
    return hosts


def _set_up(host: Host) -> None:
    """Gives a host its address, and starts its interfaces."""
    _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
    _ip("-n", host.namespace, "link", "set", "eth0", "up")
    _ip("-n", host.namespace, "link", "set", "lo", "up")


@contextmanager
def stranger(host: Host) -> Iterator[str]:
    """An address on the wire that no name resolves to. Not for long: Open MPI takes any address of an interface."""
    _ip("-n", host.namespace, "address", "add", f"{_STRANGER}/24", "dev", "eth0")
    yield _STRANGER
    _ip("-n", host.namespace, "address", "delete", f"{_STRANGER}/24", "dev", "eth0")


@contextmanager
def running(*processes: subprocess.Popen[bytes]) -> Iterator[None]:
    """Ends what still runs, also after an error."""
    try:
        yield
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()


def cut(host: Host) -> None:
    """Cut the wire."""
    _ip("-n", host.namespace, "link", "set", "eth0", "down")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
