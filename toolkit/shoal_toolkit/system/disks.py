"""Finds full file systems, to explain the failure of a job or of pip."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from shoal_toolkit.files import read_text

_FULL_BELOW = 1 << 20  # free bytes; when writing a block fails, fewer are left
_FULL = "full:"  # prefix of a mount point in the name of a fact


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
