"""Collects facts about this host that may explain a failure: memory, and full file systems."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from shoal_toolkit.files import read_text
from shoal_toolkit.system.memory import OomKills, count_oom_kills, find_memory_groups

_FULL_BELOW = 1 << 20  # free bytes; when writing a block fails, fewer are left
_FULL = "full:"  # prefix of a mount point in the name of a fact
_LIMITS = ("memory.max", "memory.limit_in_bytes")
_UNLIMITED = 1 << 60  # version 1 has a large number instead of a limit


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


def find_full_mounts(root: str = "/") -> list[str]:
    """Returns the mount points of writable file systems with less than 1 MiB or no inode free."""
    lines = [line.split(" ") for line in read_text(root, "proc/self/mounts").split("\n") if line]
    # Of two mounts on one path, the last is visible.
    writable = {_unescape_octal(fields[1]): None for fields in lines if "rw" in fields[3].split(",")}
    return [path for path in writable if _is_full(path)]


def collect_disk_facts(root: str = "/") -> dict[str, int]:
    """Returns the full mounts as facts about a failure: their number, and a fact named after each."""
    found = find_full_mounts(root)
    return {"full_mounts": len(found), **{f"{_FULL}{path}": 1 for path in found}}


def list_full_mounts(facts: Mapping[str, int]) -> str:
    """Returns the full mounts among the facts about a failure, as text."""
    return ", ".join(name[len(_FULL) :] for name in facts if name.startswith(_FULL))


def _unescape_octal(path: str) -> str:
    # The kernel writes a space as \\040, and no other character than ASCII in this way.
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)


def _is_full(path: str) -> bool:
    """Whether a mounted directory has less than 1 MiB or no inode free; False if that can't be read."""
    try:
        found = os.statvfs(path)
    except OSError:
        return False
    no_space = found.f_blocks > 0 and found.f_bavail * found.f_frsize < _FULL_BELOW
    return os.path.isdir(path) and (no_space or (found.f_files > 0 and found.f_favail == 0))


def _read_limit(root: str) -> int:
    """Returns the limit of this process's own control group, in bytes; 0 without one. Parents are not read."""
    texts = (read_text(path, name).strip() for path in find_memory_groups(root) for name in _LIMITS)
    return min((limit for text in texts if text.isdigit() and (limit := int(text)) < _UNLIMITED), default=0)


def _filesystem_size(path: str) -> int:
    """Returns the size of a file system in bytes; 0 if it can't be read."""
    try:
        found = os.statvfs(path)
    except OSError:
        return 0
    return found.f_blocks * found.f_frsize
