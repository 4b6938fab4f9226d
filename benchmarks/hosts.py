"""Two "hosts" on one machine: network namespaces with a wire between them of a given rate.

The wire is a veth pair, each end shaped with tbf. Its packets are as on a real wire (MTU 1500, TCP/IP headers count).
They never leave the machine. Everything is removed when the `with` block ends, even after an error.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

INTERFACE = "eth0"
_PREFIX = "10.213.78"
# A burst has room for a packet as TCP hands it over (64 KiB; the interface would cut a longer one), and the queue for
# the packets of several connections: nothing is dropped.
_BURST_BYTES, _QUEUE_MILLISECONDS = 128 << 10, 50


@dataclass(frozen=True)
class Host:
    """A network namespace, and its address on the wire."""

    namespace: str
    address: str

    def command(self, *words: object) -> list[str]:
        """The command that runs `words` on the host."""
        return ["ip", "netns", "exec", self.namespace, *map(str, words)]


def missing() -> str:
    """The tool or right that this machine lacks for two hosts, and how to fix it. Empty if it lacks none."""
    tools = [tool for tool in ("ip", "tc") if not shutil.which(tool)]
    if tools:
        return f"{' and '.join(tools)}. Fix: install iproute2"
    return "" if os.geteuid() == 0 else "the right to make network namespaces. Fix: run it as root"


@contextmanager
def two_hosts(rate: str) -> Iterator[tuple[Host, Host]]:
    """Two hosts, joined by a wire of `rate` each way, in the words of tc: 1gbit.

    Raises CalledProcessError if the kernel does not let this process make them; the command's own words say why.
    """
    first, second = (Host(f"shoal{os.getpid()}-{number}", f"{_PREFIX}.{number}") for number in (1, 2))
    with ExitStack() as undo:
        for host in (first, second):
            _do("ip", "netns", "add", host.namespace)
            undo.callback(_do, "ip", "netns", "delete", host.namespace)  # and all in it
        ends = [word for host in (first, second) for word in (INTERFACE, "netns", host.namespace)]
        _do("ip", "link", "add", *ends[:3], "type", "veth", "peer", *ends[3:])
        for host in (first, second):
            _do("ip", "-n", host.namespace, "address", "add", f"{host.address}/24", "dev", INTERFACE)
            _do("ip", "-n", host.namespace, "link", "set", INTERFACE, "up")
            _do("ip", "-n", host.namespace, "link", "set", "lo", "up")
            shape = ["rate", rate, "burst", str(_BURST_BYTES), "latency", f"{_QUEUE_MILLISECONDS}ms"]
            _do(*host.command("tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf", *shape))
        yield first, second


def _do(*words: str) -> None:
    subprocess.run(words, check=True)
