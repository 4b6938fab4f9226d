"""Hosts on one machine for benchmarks: network namespaces, joined by a wire of a given rate or by a switch.

Packets on the wires are as on real ones (MTU 1500, TCP/IP headers count). They never leave the machine. Everything is
removed when the `with` block ends, even after an error.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

INTERFACE = "eth0"
_PREFIX, _MASK, _LAST = "10.214", 16, 250  # of the addresses: their last number is at most 250
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


def missing(*tools: str) -> str:
    """The tool or right that this machine lacks for hosts, and how to fix it. Empty if it lacks none."""
    lacking = [tool for tool in ("ip", *tools) if not shutil.which(tool)]
    if lacking:
        return f"{' and '.join(lacking)}. Fix: install iproute2 and util-linux"
    return "" if os.geteuid() == 0 else "the right to make network namespaces. Fix: run it as root"


@contextmanager
def two_hosts(rate: str) -> Iterator[tuple[Host, Host]]:
    """Two hosts, joined by a wire of `rate` each way, in the words of tc: 1gbit.

    Raises CalledProcessError if the kernel does not let this process make them; the command's own words say why.
    """
    with ExitStack() as undo:
        first, second = _make_namespaces(2, undo)
        ends = [word for host in (first, second) for word in (INTERFACE, "netns", host.namespace)]
        _do("ip", "link", "add", *ends[:3], "type", "veth", "peer", *ends[3:])
        for host in (first, second):
            _set_up(host)
            _shape(host, INTERFACE, rate)
        yield first, second


@contextmanager
def shaped_host(rate: str) -> Iterator[Host]:
    """One host that can reach only itself, by its address and at `rate`, which has the form of tc: 1gbit.

    Raises CalledProcessError as `two_hosts` does.
    """
    with ExitStack() as undo:
        (host,) = _make_namespaces(1, undo)
        _do("ip", "-n", host.namespace, "link", "set", "lo", "mtu", "1500", "up")
        _do("ip", "-n", host.namespace, "address", "add", f"{host.address}/32", "dev", "lo")
        _shape(host, "lo", rate)
        yield host


@contextmanager
def switched_hosts(count: int) -> Iterator[list[Host]]:
    """Hosts that a switch joins, a bridge in a namespace of its own.

    Raises CalledProcessError as `two_hosts` does.
    """
    switch = f"shoal{os.getpid()}-switch"
    with ExitStack() as undo:
        hosts = _make_namespaces(count, undo)
        _do("ip", "netns", "add", switch)
        undo.callback(_do, "ip", "netns", "delete", switch)
        _do("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
        _do("ip", "-n", switch, "link", "set", "switch", "up")
        for number, host in enumerate(hosts):
            ends = [INTERFACE, "netns", host.namespace, "type", "veth", "peer", f"port{number}", "netns", switch]
            _do("ip", "link", "add", *ends)
            _do("ip", "-n", switch, "link", "set", f"port{number}", "master", "switch", "up")
            _set_up(host)
        yield hosts


def _make_namespaces(count: int, undo: ExitStack) -> list[Host]:
    """Makes a namespace for each host, without a link. `undo` deletes them, and all in them."""
    numbers = range(1, count + 1)
    hosts = [Host(f"shoal{os.getpid()}-{n}", f"{_PREFIX}.{n // _LAST}.{n % _LAST + 1}") for n in numbers]
    for host in hosts:
        _do("ip", "netns", "add", host.namespace)
        undo.callback(_do, "ip", "netns", "delete", host.namespace)
    return hosts


def _set_up(host: Host) -> None:
    """Gives a host's end of its wire the address, and starts its interfaces."""
    _do("ip", "-n", host.namespace, "address", "add", f"{host.address}/{_MASK}", "dev", INTERFACE)
    _do("ip", "-n", host.namespace, "link", "set", INTERFACE, "up")
    _do("ip", "-n", host.namespace, "link", "set", "lo", "up")


def _shape(host: Host, interface: str, rate: str) -> None:
    shape = ["rate", rate, "burst", str(_BURST_BYTES), "latency", f"{_QUEUE_MILLISECONDS}ms"]
    _do(*host.command("tc", "qdisc", "add", "dev", interface, "root", "tbf", *shape))


def _do(*words: str) -> None:
    subprocess.run(words, check=True)
