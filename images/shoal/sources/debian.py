"""The lock of a release of Debian: digests of its base images, and the packages that builds install on them.

What it can promise, and what not: docs/decisions/pins-of-debian.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from shoal.errors import SpecError
from shoal.matrix.project import Project

NOT_LOCKED = "shoal: not locked: "
"""How a build step begins the line of each package that the lock does not have."""
_BASE = re.compile(r"base (\S+) (sha256:[0-9a-f]{64})")
_PACKAGE = re.compile(r"(\S+\.deb) (SHA256:[0-9a-f]{64})")
_HEAD = "# Made by `shoal lock --bases`: base images of Debian {suite}, and the packages that builds install on them."


@dataclass(frozen=True)
class DebianLock:
    """bases: digests by the image's name without what changes of it. packages: `SHA256:…` by the name of the file."""

    bases: Mapping[str, str]
    packages: Mapping[str, str]

    def text(self, suite: str) -> str:
        bases = (f"base {name} {digest}" for name, digest in sorted(self.bases.items()))
        packages = (f"{name} {digest}" for name, digest in sorted(self.packages.items()))
        return "\n".join([_HEAD.format(suite=suite), *bases, *packages, ""])


def path(project: Project, suite: str) -> Path:
    return project.templates / "debian" / f"{suite}.txt"


def read(project: Project, suite: str) -> DebianLock:
    """Return the lock of a suite; an empty one where there is none. Raises `SpecError` naming file and line."""
    where = path(project, suite)
    bases, packages = {}, {}
    for number, line in enumerate(where.read_text().splitlines() if where.exists() else (), 1):
        if match := _BASE.fullmatch(line):
            bases[match[1]] = match[2]
        elif match := _PACKAGE.fullmatch(line):
            packages[match[1]] = match[2]
        elif line and not line.startswith("#"):
            raise SpecError(
                f"{where}:{number}: expected 'base NAME sha256:…' or 'FILE.deb SHA256:…', found {line!r}. Fix: make it"
                " again: .venv/bin/shoal lock --bases"
            )
    return DebianLock(bases, packages)


def context(project: Project, suite: str) -> dict[str, bytes]:
    """Return the files by which a build step compares what apt is about to install with the lock."""
    packages = DebianLock({}, read(project, suite).packages)
    script = files("shoal.sources").joinpath("compare.sh").read_bytes()
    return {"compare.sh": script, "lock.txt": packages.text(suite).encode() if packages.packages else b""}


def changes(before: DebianLock, after: DebianLock) -> list[str]:
    """Return how a lock differs from a later one, a line for each base or package."""
    old, new = ({**lock.bases, **lock.packages} for lock in (before, after))
    lines = [f"+ {name}" for name in sorted(new.keys() - old.keys())]
    lines += [f"- {name}" for name in sorted(old.keys() - new.keys())]
    return lines + [
        f"! {name}: {old[name]} → {new[name]}" for name in sorted(old.keys() & new.keys()) if old[name] != new[name]
    ]
