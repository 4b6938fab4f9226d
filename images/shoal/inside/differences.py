"""Where the files of two images differ, and which of it two builds of one commit may differ in."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import docker
import pydantic

from shoal.inside import asking

Kind = Literal["added", "removed", "content", "owner or mode", "bytecode's time", "time"]
EXPECTED: Mapping[str, str] = {
    "time": "a file has the time at which it was installed",
    "bytecode's time": "bytecode holds its source's time, and is read only while both agree",
}
"""In what two builds of one commit on one base differ, and why."""
TOLD = 50
"""How many of the others are told by name."""


class File(pydantic.BaseModel):
    """A file, directory or link. mode: with its type. time: ns since 1970. content: a file's SHA-256 (of bytecode
    without `source_time`, in s since 1970), or a link's target."""

    mode: int
    uid: int
    gid: int
    time: int
    content: str
    source_time: int


@dataclass(frozen=True)
class Differences:
    """Two images, how many files are in both, and what is different about which."""

    before: str
    after: str
    common: int
    found: Mapping[str, Kind]

    @property
    def counts(self) -> Counter[Kind]:
        return Counter(self.found.values())

    @property
    def unexpected(self) -> dict[str, Kind]:
        """Those that two builds of one commit do not have."""
        return {path: kind for path, kind in self.found.items() if kind not in EXPECTED}


def read(client: docker.DockerClient, tag: str) -> dict[str, File]:
    """Return the files of an image by path, and its configuration as if it were some.

    Raises ImageError where there is no image, or no Python.
    """
    said = asking.ask(client, tag, "files_probe.py")
    files = {path: File.model_validate(about) for path, about in said.items()}
    return files | dict(_configuration(client.images.get(tag).attrs["Config"]))


def _configuration(config: Mapping[str, object]) -> Iterator[tuple[str, File]]:
    for key in ("Cmd", "Entrypoint", "Env", "Labels", "User", "WorkingDir"):
        content = json.dumps(config.get(key), sort_keys=True)
        yield f"(configuration) {key}", File(mode=0, uid=0, gid=0, time=0, content=content, source_time=0)


def compare(before: str, after: str, old: Mapping[str, File], new: Mapping[str, File]) -> Differences:
    """Return where the files of two images differ, by path."""
    return Differences(before, after, len(old.keys() & new.keys()), dict(_found(old, new)))


def told(differences: Differences) -> Iterator[str]:
    """Yield lines: how many files differ in what, and why that is to be expected, or which they are."""
    yield f"{differences.before}\n{differences.after}"
    same = differences.common - sum(kind not in ("added", "removed") for kind in differences.found.values())
    yield f"{same:>9,} files, directories and links are the same in both"
    for kind, count in differences.counts.most_common():
        yield f"{count:>9,} differ: {kind}{f' ({EXPECTED[kind]})' if kind in EXPECTED else ''}"
    for path, kind in list(differences.unexpected.items())[:TOLD]:
        yield f"✗ {kind}: {path}"
    if (more := len(differences.unexpected) - TOLD) > 0:
        yield f"✗ and {more:,} more, which --json names"
    if not differences.unexpected:
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
    if old.source_time != new.source_time:
        return "bytecode's time"
    return "time" if old.time != new.time else None
