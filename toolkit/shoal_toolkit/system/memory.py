"""Reads how many processes the kernel has killed for lack of memory, the memory limits, and the size of /dev/shm.

Each host reads them when a job begins and when it fails: the difference belongs to the job. Supports control groups of
versions 1 and 2. A container without its own cgroup namespace sees its group as the root.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from shoal_toolkit.files import read_text

_COUNTERS = ("memory.events", "memory.oom_control")
_LIMITS = ("memory.max", "memory.limit_in_bytes")
_UNLIMITED = 1 << 60  # version 1 has a large number instead of a limit


class OomKills(NamedTuple):
    """Numbers of processes killed for lack of memory since the start of the control group, and of the machine."""

    group: int
    machine: int


def count_oom_kills(root: str = "/") -> OomKills:
    """Returns the kernel's counters; 0 if there are none."""
    group = sum(
        _read_kill_counter(os.path.join(path, name)) for path in _find_memory_groups(root) for name in _COUNTERS
    )
    return OomKills(group, _read_kill_counter(os.path.join(root, "proc/vmstat")))


def collect_memory_facts(before: OomKills, root: str = "/") -> dict[str, int]:
    """Returns facts about a failure: processes killed since `before`, memory limit and size of /dev/shm in bytes.

    A limit or size of 0 means none.

    Args:
        before: The counters when the job began.
        root: The directory under which dev, proc and sys are.
    """
    after = count_oom_kills(root)
    return {
        "oom_kills": after.group - before.group,
        "machine_oom_kills": after.machine - before.machine,
        "memory_limit": _read_limit(root),
        "shm": _filesystem_size(os.path.join(root, "dev/shm")),
    }


def _find_memory_groups(root: str) -> list[str]:
    """Returns the directories of this process's memory control groups, at most one of each version."""
    found = []
    for line in read_text(root, "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            mounted = os.path.join(root, "sys/fs/cgroup", controllers)
            own = os.path.join(mounted, path.lstrip("/"))
            found.append(own if os.path.isdir(own) else mounted)
    return found


def _read_limit(root: str) -> int:
    """Returns the limit of this process's own control group, in bytes; 0 without one. Parents are not read."""
    texts = (read_text(path, name).strip() for path in _find_memory_groups(root) for name in _LIMITS)
    return min((limit for text in texts if text.isdigit() and (limit := int(text)) < _UNLIMITED), default=0)


def _filesystem_size(path: str) -> int:
    """Returns the size of a file system in bytes; 0 if it can't be read."""
    try:
        found = os.statvfs(path)
    except OSError:
        return 0
    return found.f_blocks * found.f_frsize


def _read_kill_counter(path: str) -> int:
    for line in read_text(path).splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.isdigit():
            return int(value)
    return 0
