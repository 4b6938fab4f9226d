"""The short check of several hosts before each launch: the first host compares facts that the others send anyway."""

from __future__ import annotations

from collections.abc import Mapping
from time import time
from typing import Any

from shoal_toolkit.hosts.probe import open_port
from shoal_toolkit.job.contract import Paths
from shoal_toolkit.log import write_log
from shoal_toolkit.plan.plan import LaunchPlan
from shoal_toolkit.preflight.facts import collect_facts
from shoal_toolkit.preflight.findings import HostFinding, compare_facts

_MAX_LOGGED = 10


class Preflight:
    """Collects the facts of all hosts. Creating it opens MASTER_PORT on this host, until `close` or the comparison."""

    def __init__(self, paths: Paths, plan: LaunchPlan, one_kind: bool) -> None:
        self._one_kind = one_kind
        port = plan.env["MASTER_PORT"]
        self._door = open_port(port)
        self._taken = "" if self._door else f"another process has the port {port} (MASTER_PORT)"
        self._paths, self._plan = paths, plan
        self._facts: dict[str, Mapping[str, Any]] = {plan.current_host: {}}
        self._delays: dict[str, float] = {}

    def collect(self) -> None:
        """Collects the facts about this host, while the others are looked for. One is whether MASTER_PORT is taken."""
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

    def find(self) -> list[HostFinding]:
        """Closes the port, and returns the findings."""
        self.close()
        return compare_facts(self._facts, self._delays, self._one_kind)

    def log_findings(self) -> None:
        """Closes the port, and logs at most ten findings. The job starts all the same: a finding may be harmless."""
        found = self.find()
        for finding in found[:_MAX_LOGGED]:
            write_log(f"preflight: {finding}")
        if len(found) > _MAX_LOGGED:
            write_log(f"preflight: and {len(found) - _MAX_LOGGED} more. Fix: run `train --preflight` on every host")

    def close(self) -> None:
        """Closes the port, for the ranks."""
        if self._door is not None:
            self._door.close()
            self._door = None
