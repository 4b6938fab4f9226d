"""Compares the locks of two states of a project: the packages that change, and their price in bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.formats import format_byte_change, format_bytes, format_count
from shoal.matrix.project import Project
from shoal.matrix.spec import BuildSpec, ImageSpec
from shoal.sources import lock
from shoal.sources.lock import Pin
from shoal.sources.releases import Indexes


@dataclass(frozen=True)
class PinChange:
    """A package of an image that changes. A version is empty if the image has not got it."""

    name: str
    before: str
    after: str

    def __str__(self) -> str:
        if self.before == self.after:
            return f"{self.name} {self.after}: another file"
        return f"{self.name} {self.before or '–'} → {self.after or '–'}"


@dataclass(frozen=True)
class LockChange:
    """How the locks of an image and its variants change."""

    tag: str
    is_new: bool
    packages: tuple[PinChange, ...]
    bytes: int
    """The size of the new files, less the size of the old ones: to download, and to store in a registry."""
    unknown: int
    """The number of files that no index names a size of."""

    def __str__(self) -> str:
        count = format_count(len(self.packages), "package")
        size = format_bytes(self.bytes) if self.is_new else format_byte_change(self.bytes)
        unknown = f", and {format_count(self.unknown, 'file')} of unknown size" if self.unknown else ""
        return f"{self.tag}: {'new' if self.is_new else 'changes'}, {count}, {size}{unknown}"


def list_changes(before: Project, after: Project, matrix: BuildSpec, indexes: Indexes) -> Iterator[LockChange]:
    """Yields the changes of images. Asks the indexes for sizes."""
    known: set[Path] = set()
    for image in matrix.images:
        directory = after.lock_directory(image)
        if directory in known:  # of a variant
            continue
        known.add(directory)
        old, new = (_read_pins(project.lock_directory(image)) for project in (before, after))
        if old != new:
            index = matrix.indexes[image.index] if image.index else None
            yield _compare(image, old, new, indexes, index)


def _read_pins(directory: Path) -> dict[str, Pin]:
    files = sorted(directory.glob("*.txt"))
    return {pin.name: pin for path in files for pin in lock.read_lock(path)}


def _compare(
    image: ImageSpec, old: Mapping[str, Pin], new: Mapping[str, Pin], indexes: Indexes, index: str | None
) -> LockChange:
    names = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    wheels = indexes.list_wheels(names, image.python_version, index)
    sizes = {wheel.sha256: wheel.size for found in wheels.values() for wheel in found}
    added, removed = ([sizes.get(side[name].sha256) for name in names if name in side] for side in (new, old))
    packages = tuple(PinChange(name, _version(old, name), _version(new, name)) for name in names)
    unknown = (added + removed).count(None)
    return LockChange(image.tag, not old, packages, _sum(added) - _sum(removed), unknown)


def _version(pinned: Mapping[str, Pin], name: str) -> str:
    return pinned[name].version if name in pinned else ""


def _sum(sizes: Iterable[int | None]) -> int:
    return sum(size or 0 for size in sizes)
