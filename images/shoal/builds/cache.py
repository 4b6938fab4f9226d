"""Removes files from the cache of builds, which later builds make again if they need them."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Removed:
    """A file that was removed."""

    path: Path
    bytes: int


def prune_cache(cache: Path, bases: Collection[Path]) -> list[Removed]:
    """Removes logs of builds, installed copies of our packages, and archives of base images.

    Args:
        cache: The directory of caches. Other files in it stay.
        bases: The archives of base images to keep.

    Returns:
        The files that were removed. Another command may have removed some of the others meanwhile.
    """
    paths = [path for glob in ("logs/*.log", "installed/*.tar", "base-*.tar") for path in sorted(cache.glob(glob))]
    removed = []
    for path in paths:
        if path not in bases:
            with contextlib.suppress(FileNotFoundError):
                removed.append(Removed(path, path.stat().st_size))
                path.unlink()
    return removed
