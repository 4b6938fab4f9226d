"""Compares the files of two images, and separates differences that two builds of one commit may have from others."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import docker

from shoal.docker_client.images import read_config
from shoal.errors import DifferenceError
from shoal.image import filesystem
from shoal.image.filesystem import PYTHON, File, FileSystem

Kind = Literal["added", "removed", "content", "owner or mode", "extended attributes", "bytecode's time", "time"]
EXPECTED: Mapping[str, str] = {
    "time": "the time at which the file was installed",
    "bytecode's time": "bytecode records the time of its source",
}
"""The differences between two builds of one commit on one base, and why they are there."""
_CONFIGURATION = (
    *("Cmd", "Entrypoint", "Env", "ExposedPorts", "Healthcheck", "Labels", "OnBuild", "Shell", "StopSignal", "User"),
    *("Volumes", "WorkingDir"),
)
MAX_LISTED = 50
"""How many unexplained differences are printed."""


@dataclass(frozen=True)
class PackageChange:
    """A package that has another version, or is in only one of the images."""

    name: str
    """Of a Debian package, or of a Python distribution after `python:`."""
    before: str
    """Its version; empty if it is not installed."""
    after: str
    files: int
    """How many unexpected differences it explains."""

    def __str__(self) -> str:
        versions = f"{self.before or 'not installed'} → {self.after or 'not installed'}"
        kind = "Python" if self.name.startswith(PYTHON) else "Debian"
        return f"{kind} package {self.name.removeprefix(PYTHON)}: {versions}, {self.files:,} files"


@dataclass(frozen=True)
class Differences:
    """The differences between two images."""

    before: str
    after: str
    common: int
    """How many paths are in both images."""
    found: Mapping[str, Kind]
    """The kind of difference, by path."""
    packages: tuple[PackageChange, ...] = ()
    owners: Mapping[str, str] = field(default_factory=dict)
    """The changed package that explains a difference, by path."""

    @property
    def counts(self) -> Counter[Kind]:
        """The number of differences of each kind."""
        return Counter(self.found.values())

    @property
    def unexpected(self) -> dict[str, Kind]:
        """The differences that two builds of one commit do not have."""
        return {path: kind for path, kind in self.found.items() if kind not in EXPECTED}

    @property
    def unexplained(self) -> dict[str, Kind]:
        """The unexpected differences that no changed package explains."""
        return {path: kind for path, kind in self.unexpected.items() if path not in self.owners}

    def check(self) -> None:
        """Raises `DifferenceError` if there are differences that two builds of one commit do not have.

        A package in another version is one of them.
        """
        if self.unexpected or self.packages:
            raise DifferenceError(
                f"{self.before} and {self.after} differ in {len(self.unexpected):,} files and"
                f" {len(self.packages)} packages, apart from file times. Fix: build both from one commit and one"
                " base (docs/size.md lists the expected differences)"
            )


def read_image(client: docker.DockerClient, tag: str) -> FileSystem:
    """Returns the file system of an image, with its configuration as further files. No code of the image runs.

    Raises:
        DockerError: If Docker lacks the image.
    """
    found = filesystem.read_filesystem(client, tag)
    found.files.update(_configuration_files(read_config(client.images.get(tag))))
    return found


def _configuration_files(config: Mapping[str, object]) -> Iterator[tuple[str, File]]:
    """Yields each part of the configuration of an image that containers and later builds obey, as a file."""
    for key in _CONFIGURATION:
        content = json.dumps(config.get(key) or None, sort_keys=True)
        yield f"(configuration) {key}", File(mode=0, uid=0, gid=0, time=0, content=content, source_time=0)


def compare_images(before: str, after: str, old: FileSystem, new: FileSystem) -> Differences:
    """Compares two images, with the tags `before` and `after`, by their files and packages."""
    found = dict(_compare_files(old.files, new.files))
    names = {name for name, _ in old.packages.items() ^ new.packages.items()}
    owner = {path: (new.files.get(path) or old.files[path]).package for path in found if found[path] not in EXPECTED}
    owners = {path: name for path, name in owner.items() if name in names}
    files = Counter(owners.values())
    packages = tuple(
        PackageChange(name, old.packages.get(name, ""), new.packages.get(name, ""), files[name])
        for name in sorted(names)
    )
    return Differences(before, after, len(old.files.keys() & new.files.keys()), found, packages, owners)


def format_differences(differences: Differences) -> Iterator[str]:
    """Yields the lines of a report: the number of differences of each kind, changed packages, and unexplained paths.

    At most MAX_LISTED of these paths are listed. The last line says if there are no unexpected differences.
    """
    yield f"{differences.before}\n{differences.after}"
    same = differences.common - sum(kind not in ("added", "removed") for kind in differences.found.values())
    yield f"{same:>9,} files, directories and links are the same in both"
    for kind, count in differences.counts.most_common():
        yield f"{count:>9,} differ in {kind}{f' ({EXPECTED[kind]})' if kind in EXPECTED else ''}"
    yield from (f"✗ {change}" for change in differences.packages)
    for path, kind in list(differences.unexplained.items())[:MAX_LISTED]:
        yield f"✗ {kind}: {path}"
    if (more := len(differences.unexplained) - MAX_LISTED) > 0:
        yield f"✗ and {more:,} more, which --json lists"
    if not differences.unexpected and not differences.packages:
        yield "✓ no unexpected differences for two builds of one commit"


def _compare_files(old: Mapping[str, File], new: Mapping[str, File]) -> Iterator[tuple[str, Kind]]:
    for path in sorted(old.keys() | new.keys()):
        if path not in old or path not in new:
            yield path, "added" if path in new else "removed"
        elif kind := _compare_file(old[path], new[path]):
            yield path, kind


def _compare_file(old: File, new: File) -> Kind | None:
    if old.content != new.content:
        return "content"
    if (old.mode, old.uid, old.gid) != (new.mode, new.uid, new.gid):
        return "owner or mode"
    if old.attributes != new.attributes:
        return "extended attributes"
    if old.source_time != new.source_time:
        return "bytecode's time"
    return "time" if old.time != new.time else None
