"""The lock of a Debian suite: digests of its base images, and of the packages that builds install on them.

Its guarantees and their limits: docs/decisions/pins-of-debian.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from shoal.errors import SpecError
from shoal.limits import read_project_file
from shoal.matrix.project import Project

NOT_LOCKED = "shoal: not locked: "
"""The start of the line that a build step prints for each package that the lock does not have."""
_BASE = re.compile(r"base (\S+) (sha256:[0-9a-f]{64})")
_PACKAGE = re.compile(r"(\S+\.deb) (SHA256:[0-9a-f]{64})")
_HEAD = "# Made by `shoal lock --bases`: base images of Debian {suite}, and the packages that builds install on them."

_CHILD_HEAD = "# Made by `shoal lock --bases`: more packages of Debian {suite}, which builds of {child} install."


@dataclass(frozen=True)
class DebianLock:
    """Digests of base images by the constant part of their names, and of packages (`SHA256:…`) by file name."""

    bases: Mapping[str, str]
    packages: Mapping[str, str]

    def text(self, suite: str, child: str = "") -> str:
        """Returns the content of the lock file of a suite, or of a child in it, sorted."""
        bases = (f"base {name} {digest}" for name, digest in sorted(self.bases.items()))
        packages = (f"{name} {digest}" for name, digest in sorted(self.packages.items()))
        head = (_CHILD_HEAD if child else _HEAD).format(suite=suite, child=child)
        return "\n".join([head, *bases, *packages, ""])


def lock_path(project: Project, suite: str, child: str = "") -> Path:
    """Returns the path of the lock file of a suite, or of a child in it. The file may not exist."""
    return project.templates / "debian" / (f"{suite}-{child}.txt" if child else f"{suite}.txt")


def read_lock(project: Project, suite: str, child: str = "") -> DebianLock:
    """Returns the lock of a suite or a child in it; empty if there is none. Raises `SpecError` with file and line."""
    where = lock_path(project, suite, child)
    bases, packages = {}, {}
    for number, line in enumerate(read_project_file(where).splitlines() if where.exists() else (), 1):
        if match := _BASE.fullmatch(line):
            bases[match[1]] = match[2]
        elif match := _PACKAGE.fullmatch(line):
            packages[match[1]] = match[2]
        elif line and not line.startswith("#"):
            raise SpecError(
                f"{where}:{number}: expected 'base NAME sha256:…' or 'FILE.deb SHA256:…', found {line!r}. Fix: make it"
                " again: shoal lock --bases"
            )
    return DebianLock(bases, packages)


def comparison_files(project: Project, suite: str, children: Iterable[str] = ()) -> dict[str, bytes]:
    """Returns the files with which a build step compares the packages of apt with the lock: compare.sh and lock.txt.

    lock.txt is empty if no packages are locked.

    Args:
        project: The project.
        suite: The suite of the image.
        children: The child, and those that it extends, of which the locks count too. None for an image without parent.
    """
    locks = [read_lock(project, suite, child) for child in ("", *children)]
    packages = DebianLock({}, {name: digest for lock in locks for name, digest in lock.packages.items()})
    script = files("shoal.sources").joinpath("compare.sh").read_bytes()
    return {"compare.sh": script, "lock.txt": packages.text(suite).encode() if packages.packages else b""}


def describe_changes(before: DebianLock, after: DebianLock) -> list[str]:
    """Returns a line for each base image or package that is new, gone or changed between two locks."""
    old, new = ({**lock.bases, **lock.packages} for lock in (before, after))
    lines = [f"+ {name}" for name in sorted(new.keys() - old.keys())]
    lines += [f"- {name}" for name in sorted(old.keys() - new.keys())]
    return lines + [
        f"! {name}: {old[name]} → {new[name]}" for name in sorted(old.keys() & new.keys()) if old[name] != new[name]
    ]
