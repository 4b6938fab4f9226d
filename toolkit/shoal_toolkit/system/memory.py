"""Counts the processes that the kernel has killed for lack of memory.

Each host counts them when a job begins and when it fails: the difference belongs to the job. Supports control groups of
versions 1 and 2. A container without its own cgroup namespace sees its group as the root.
"""

from __future__ import annotations

import os

from shoal_toolkit.fast_typing import NamedTuple
from shoal_toolkit.files import read_text

_COUNTERS = ("memory.events", "memory.oom_control")


class OomKills(NamedTuple):
    """Numbers of processes killed for lack of memory since the start of the control group, and of the machine."""

    group: int
    machine: int


def count_oom_kills(root: str = "/") -> OomKills:
    """Returns the kernel's counters; 0 if there are none."""
    group = sum(_read_kill_counter(os.path.join(path, name)) for path in find_memory_groups(root) for name in _COUNTERS)
    return OomKills(group, _read_kill_counter(os.path.join(root, "proc/vmstat")))


def find_memory_groups(root: str) -> list[str]:
    """Returns the directories of this process's memory control groups, at most one of each version."""
    found = []
    for line in read_text(root, "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            mounted = os.path.join(root, "sys/fs/cgroup", controllers)
            own = os.path.join(mounted, path.lstrip("/"))
            found.append(own if os.path.isdir(own) else mounted)
    return found


def _read_kill_counter(path: str) -> int:
    for line in read_text(path).splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.isdigit():
            return int(value)
    return 0
