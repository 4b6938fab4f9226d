"""Which file systems are full: read where a job fails for lack of space, on each host for its own."""

from __future__ import annotations

import os
from collections.abc import Mapping

_LEFT = 1 << 20  # bytes; a program that fails to write a block leaves less
_FULL = "full:"  # before the mount point, as a fact


def full_mounts(root: str = "/") -> list[str]:
    """Return the mount points of the writable file systems that have no space, or no room for another file."""
    try:
        with open(os.path.join(root, "proc/self/mounts"), encoding="utf-8", errors="replace") as file:
            lines = [line.split(" ") for line in file]
    except OSError:
        return []
    # Spaces in a name are \\040 there. What is mounted upon another is in its place.
    writable = {_unescaped(fields[1]): None for fields in lines if "rw" in fields[3].split(",")}
    return [path for path in writable if _is_full(path)]


def facts(root: str = "/") -> dict[str, int]:
    """Return them as facts of a failure: how many there are, and one for each."""
    found = full_mounts(root)
    return {"full_mounts": len(found), **{f"{_FULL}{path}": 1 for path in found}}


def named(facts: Mapping[str, int]) -> str:
    """Return the mount points among the facts of a failure."""
    return ", ".join(name[len(_FULL) :] for name in facts if name.startswith(_FULL))


def _unescaped(path: str) -> str:
    return path.encode().decode("unicode_escape")


def _is_full(path: str) -> bool:
    try:
        found = os.statvfs(path)
    except OSError:
        return False
    no_space = found.f_blocks > 0 and found.f_bavail * found.f_frsize < _LEFT
    return os.path.isdir(path) and (no_space or (found.f_files > 0 and found.f_favail == 0))
