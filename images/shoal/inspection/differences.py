"""Where the files of two images differ, and which of it two builds of one commit may differ in."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import docker

from shoal.errors import DifferenceError
from shoal.inspection import filesystem
from shoal.inspection.filesystem import File, Image

Kind = Literal["added", "removed", "content", "owner or mode", "extended attributes", "bytecode's time", "time"]
EXPECTED: Mapping[str, str] = {
    "time": "a file has the time at which it was installed",
    "bytecode's time": "bytecode holds its source's time, and is read only while both agree",
}
"""In what two builds of one commit on one base differ, and why."""
TOLD = 50
"""How many of the others are told by name."""


@dataclass(frozen=True)
class PackageChange:
    """A package of Debian whose version is another; empty where it is not there. files: how many differ for it, in
    what nothing else explains.
    """

    name: str
    before: str
    after: str
    files: int

    def __str__(self) -> str:
        versions = f"{self.before or 'not there'} → {self.after or 'not there'}"
        return f"Debian's {self.name}: {versions}, {self.files:,} files"


@dataclass(frozen=True)
class Differences:
    """Two images, how many files are in both, and what is different about which; `owners` says which of these belong
    to packages of Debian that have changed.
    """

    before: str
    after: str
    common: int
    found: Mapping[str, Kind]
    packages: tuple[PackageChange, ...] = ()
    owners: Mapping[str, str] = field(default_factory=dict)

    @property
    def counts(self) -> Counter[Kind]:
        return Counter(self.found.values())

    @property
    def unexpected(self) -> dict[str, Kind]:
        """Those that two builds of one commit do not have."""
        return {path: kind for path, kind in self.found.items() if kind not in EXPECTED}

    @property
    def unexplained(self) -> dict[str, Kind]:
        """Those of them that no package of another version has."""
        return {path: kind for path, kind in self.unexpected.items() if path not in self.owners}

    def check(self) -> None:
        """Raise DifferenceError for any that two builds of one commit do not have."""
        if self.unexpected or self.packages:
            raise DifferenceError(
                f"{self.before} and {self.after} differ in {len(self.unexpected):,} files and"
                f" {len(self.packages)} of Debian's packages, besides their times. What to do: docs/size.md says what"
                " two builds of one commit may differ in"
            )


def read(client: docker.DockerClient, tag: str) -> Image:
    """Return the files of an image by path, its configuration as if it were some, and its packages.

    Nothing of the image is run. Raises DockerError where there is no image.
    """
    found = filesystem.read(client, tag)
    found.files.update(_configuration(client.images.get(tag).attrs["Config"]))
    return found


def _configuration(config: Mapping[str, object]) -> Iterator[tuple[str, File]]:
    for key in ("Cmd", "Entrypoint", "Env", "Labels", "User", "WorkingDir"):
        content = json.dumps(config.get(key), sort_keys=True)
        yield f"(configuration) {key}", File(mode=0, uid=0, gid=0, time=0, content=content, source_time=0)


def compare(before: str, after: str, old: Image, new: Image) -> Differences:
    """Return where the files of two images differ, by path, and their packages, by name."""
    found = dict(_found(old.files, new.files))
    names = {name for name, _ in old.packages.items() ^ new.packages.items()}
    owner = {path: (new.files.get(path) or old.files[path]).package for path in found if found[path] not in EXPECTED}
    owners = {path: name for path, name in owner.items() if name in names}
    files = Counter(owners.values())
    packages = tuple(
        PackageChange(name, old.packages.get(name, ""), new.packages.get(name, ""), files[name])
        for name in sorted(names)
    )
    return Differences(before, after, len(old.files.keys() & new.files.keys()), found, packages, owners)


def told(differences: Differences) -> Iterator[str]:
    """Yield lines: how many files differ in what, and why that is to be expected, or which they are."""
    yield f"{differences.before}\n{differences.after}"
    same = differences.common - sum(kind not in ("added", "removed") for kind in differences.found.values())
    yield f"{same:>9,} files, directories and links are the same in both"
    for kind, count in differences.counts.most_common():
        yield f"{count:>9,} differ: {kind}{f' ({EXPECTED[kind]})' if kind in EXPECTED else ''}"
    yield from (f"✗ {change}" for change in differences.packages)
    for path, kind in list(differences.unexplained.items())[:TOLD]:
        yield f"✗ {kind}: {path}"
    if (more := len(differences.unexplained) - TOLD) > 0:
        yield f"✗ and {more:,} more, which --json names"
    if not differences.unexpected and not differences.packages:
        yield "✓ as two builds of one commit"


def _found(old: Mapping[str, File], new: Mapping[str, File]) -> Iterator[tuple[str, Kind]]:
    for path in sorted(old.keys() | new.keys()):
        if path not in old or path not in new:
            yield path, "added" if path in new else "removed"
        elif kind := _kind(old[path], new[path]):
            yield path, kind


def _kind(old: File, new: File) -> Kind | None:
    """What is different about a file: the first of what is."""
    if old.content != new.content:
        return "content"
    if (old.mode, old.uid, old.gid) != (new.mode, new.uid, new.gid):
        return "owner or mode"
    if old.attributes != new.attributes:
        return "extended attributes"
    if old.source_time != new.source_time:
        return "bytecode's time"
    return "time" if old.time != new.time else None
