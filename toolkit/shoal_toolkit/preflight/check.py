"""The short check of several hosts before each launch: the first host compares facts that the others send anyway.

Each worker checks that it reaches the port at which the ranks will meet. The first host listens there until the launch.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Mapping
from time import time

from shoal_toolkit.errors import LaunchError
from shoal_toolkit.fast_typing import Any
from shoal_toolkit.hosts.resolve import Address, Resolver
from shoal_toolkit.job.contract import Paths
from shoal_toolkit.log import write_log
from shoal_toolkit.plan.plan import LaunchPlan
from shoal_toolkit.preflight.facts import collect_facts
from shoal_toolkit.preflight.findings import HostFinding, compare_facts, describe_efa
from shoal_toolkit.system.loop import WRITE, Loop

_MAX_LOGGED = 10
_PROBE_SECONDS = 2.0
_BACKLOG = 4096  # connections that wait to be accepted


class Preflight:
    """Collects the facts of all hosts. Creating it opens MASTER_PORT on this host, until `close` or the comparison."""

    def __init__(self, paths: Paths, plan: LaunchPlan, one_kind: bool) -> None:
        self._one_kind = one_kind
        port = plan.env["MASTER_PORT"]
        self._door = _open_port(port)
        self._taken = "" if self._door else f"another process has the port {port} (MASTER_PORT)"
        self._paths, self._plan = paths, plan
        self._facts: dict[str, Mapping[str, Any]] = {plan.current_host: {}}
        self._delays: dict[str, float] = {}

    def collect(self) -> None:
        """Collects the facts about this host once, while others are looked for. One is whether MASTER_PORT is taken."""
        if self._facts[self._plan.current_host]:
            return
        own = {**collect_facts(self._paths, self._plan), "port_taken": self._taken}
        self._facts[self._plan.current_host] = own

    def add(self, host: str, facts: Mapping[str, Any]) -> None:
        """Notes the facts of a worker, and how late they arrive by this host's clock."""
        self._facts[host] = facts
        sent = facts.get("time")
        if isinstance(sent, (int, float)):
            self._delays[host] = time() - sent

    def list_facts(self, name: str) -> dict[str, Any]:
        """Returns one fact of each host that has it."""
        return {host: facts[name] for host, facts in self._facts.items() if name in facts}

    def describe(self) -> list[str]:
        """Returns lines about the network of the hosts. A line is not a finding."""
        return describe_efa(self._facts)

    def find(self) -> list[HostFinding]:
        """Closes the port, and returns the findings."""
        self.close()
        return compare_facts(self._facts, self._delays, self._one_kind)

    def log_findings(self) -> None:
        """Closes the port, and logs at most ten findings. The job starts all the same: a finding may be harmless.

        Raises LaunchError if only some hosts fork their ranks: they would never meet the other ranks.
        """
        found = self.find()
        if len({*self.list_facts("forks").values()}) > 1:
            raise LaunchError(
                "SHOAL_STANDBY is 0 on some hosts only: ranks of torchrun and ranks that are forked never meet. "
                "Fix: set it to one value on every host."
            )
        for finding in found[:_MAX_LOGGED]:
            write_log(f"preflight: {finding}")
        if len(found) > _MAX_LOGGED:
            write_log(f"preflight: and {len(found) - _MAX_LOGGED} more. Fix: run `train --preflight` on every host")

    def close(self) -> None:
        """Closes the port, for the ranks."""
        if self._door is not None:
            self._door.close()
            self._door = None


def _open_port(port: str) -> socket.socket | None:
    """Listens on a port of this host until the socket is closed; None if that is not possible.

    No connection is accepted: the kernel answers, and the side that closes first is the worker's. Otherwise the port
    would stay reserved for a minute.
    """
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        return socket.create_server(("", int(port)), family=family, dualstack_ipv6=both, backlog=_BACKLOG)
    except (OSError, ValueError, OverflowError):  # also if MASTER_PORT is not a port
        return None


class Probe:
    """Looks up a name and connects to a port there, from its creation on, for 2 s at most.

    Calls `on_probed(problem)` once, with an empty text if the connection succeeded.
    """

    def __init__(self, loop: Loop, host: str, port: str, on_probed: Callable[[str], None]) -> None:
        self._loop = loop
        self._on_probed = on_probed
        self._place = f"{host} at port {port} (MASTER_ADDR, MASTER_PORT)"
        self._sock: socket.socket | None = None
        self._timer = loop.call_later(_PROBE_SECONDS, self._on_timeout)
        self._resolver = Resolver(loop)
        self._resolver.look_up(host, int(port) if port.isdecimal() else 0, self._on_resolved)

    def _on_resolved(self, found: list[Address] | OSError) -> None:
        if isinstance(found, OSError):
            self._end(f"its name is unknown ({found.strerror or found})")
            return
        family, address = found[0]
        self._sock = sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        result = sock.connect_ex(address)
        if result in (0, errno.EINPROGRESS):
            self._loop.watch(sock.fileno(), WRITE, self._on_connected)
        else:
            self._end(os.strerror(result))

    def _on_timeout(self) -> None:
        """Reports that there is no answer, unless the kernel has connected while this process had to wait for a CPU."""
        if self._sock is None:
            self._end(f"its name was not looked up within {_PROBE_SECONDS:.0f} s")
            return
        try:
            self._sock.getpeername()
        except OSError:
            self._end("there is no answer")
        else:
            self._end("")

    def _on_connected(self) -> None:
        if self._sock is not None:
            problem = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            self._end(os.strerror(problem) if problem else "")

    def _end(self, problem: str) -> None:
        self.close()
        self._on_probed(f"it cannot reach {self._place}: {problem}" if problem else "")

    def close(self) -> None:
        """Ends the check without a report."""
        self._timer.cancel()
        self._resolver.close()
        if self._sock is not None:
            self._loop.unwatch(self._sock.fileno(), WRITE)
            self._sock.close()
            self._sock = None
