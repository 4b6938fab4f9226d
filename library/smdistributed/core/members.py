"""The ranks of a group: the process, host and CPUs of each, and whether it can run the C engine.

They are exchanged through the group's store.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from smdistributed.core import native, segment
from smdistributed.core.segment import Process
from smdistributed.core.store import Store, exchange_texts


@dataclass(frozen=True)
class Member:
    process: Process
    number: int
    """Its rank in the job, which messages show."""
    host: str
    """The name of its host."""
    token: str
    """Unique to this process in this group."""
    problem: str
    """Why it cannot run the C engine; empty: it can."""
    cpus: Sequence[int]
    """The CPUs of its host on which it may run."""

    def describe(self, shows_host: bool = True) -> str:
        return f"rank {self.number} (process {self.process.pid}{f' on {self.host}' if shows_host else ''})"


def exchange_members(store: Store, rank: int, size: int, number: int | None = None) -> list[Member]:
    """Exchanges the processes and hosts of a group's ranks, which all call it; returns all members in rank order.

    `store` is the group's own, `rank` and `size` this rank in it and their number. `number`: this rank in the job;
    None: the same as `rank`.
    """
    host = os.environ.get("SMDDP_HOST") or socket.gethostname()
    cpus = sorted(os.sched_getaffinity(0))
    about = [rank if number is None else number, host, secrets.token_hex(8), native.engine_problem(), cpus]
    mine = json.dumps([segment.this_process(), *about])
    everybody = [json.loads(text) for text in exchange_texts(store, "process", rank, size, mine)]
    return [Member(Process(*process), *others) for process, *others in everybody]
