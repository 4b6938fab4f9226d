"""Memory as the kernel accounts for it: how many processes it has killed for lack of it, and what the limits are.

Read when a job begins and when it fails, on each host for its own: only the difference is the job's. Control groups of
version 2 and 1; a container without a namespace of its own for them sees its group as their root.
"""

from __future__ import annotations

import os

from shoal_toolkit.light_typing import NamedTuple

_COUNTERS = ("memory.events", "memory.oom_control")
_LIMITS = ("memory.max", "memory.limit_in_bytes")
_UNLIMITED = 1 << 60  # version 1 writes a large number


class Kills(NamedTuple):
    """Processes that were killed for lack of memory, since the group or the machine was started."""

    group: int
    machine: int


def kills(root: str = "/") -> Kills:
    """Return the kernel's counters; 0 where there are none."""
    group = sum(_counter(os.path.join(path, name)) for path in _groups(root) for name in _COUNTERS)
    return Kills(group, _counter(os.path.join(root, "proc/vmstat")))


def facts(before: Kills, root: str = "/") -> dict[str, int]:
    """Return what has happened since, and the limits in bytes: 0 for none."""
    after = kills(root)
    return {
        "oom_kills": after.group - before.group,
        "machine_oom_kills": after.machine - before.machine,
        "memory_limit": _limit(root),
        "shm": _size(os.path.join(root, "dev/shm")),
    }


def _groups(root: str) -> list[str]:
    """Return the directory of this process's memory group, of each version that there is."""
    found = []
    for line in _read(os.path.join(root, "proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            mounted = os.path.join(root, "sys/fs/cgroup", controllers)
            own = os.path.join(mounted, path.lstrip("/"))
            found.append(own if os.path.isdir(own) else mounted)
    return found


def _limit(root: str) -> int:
    texts = (_read(os.path.join(path, name)).strip() for path in _groups(root) for name in _LIMITS)
    return min((limit for text in texts if text.isdigit() and (limit := int(text)) < _UNLIMITED), default=0)


def _size(path: str) -> int:
    try:
        found = os.statvfs(path)
    except OSError:
        return 0
    return found.f_blocks * found.f_frsize


def _counter(path: str) -> int:
    for line in _read(path).splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.isdigit():
            return int(value)
    return 0


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
