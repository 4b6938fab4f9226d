"""Files and directories of this machine that `shoal run --volume` mounts in the containers of all hosts."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import docker.types

from shoal.errors import UsageError

_TREE = PurePosixPath("/opt/ml")
_OWN = ("checkpoints", "code", "input", "model", "output")
"""The directories of a job in its tree. Scripts may have others there, such as `../data` beside their code."""
_MODES = {"": False, "rw": False, "ro": True}


@dataclass(frozen=True)
class Volume:
    """A file or directory, and its place in the containers."""

    source: Path
    target: str
    """An absolute path."""
    read_only: bool = False

    @classmethod
    def parse(cls, text: str) -> Volume:
        """Returns the volume that `PATH:TARGET[:ro]` describes. Raises `UsageError`."""
        source, _, rest = text.partition(":")
        target, _, mode = rest.partition(":")
        if not source or not target.startswith("/") or mode not in _MODES:
            raise UsageError(
                f"--volume {text}: expected PATH:TARGET or PATH:TARGET:ro. Fix: for example --volume ./cache:/cache"
            )
        return cls(Path(source), target, _MODES[mode])

    def check(self) -> None:
        """Raises `UsageError` if the source is missing, or the target would hide or change files of the job."""
        if not self.source.exists():
            raise UsageError(
                f"--volume {self.source}:{self.target}: no such file or directory: {self.source}. Fix: name one"
                " that exists"
            )
        target = PurePosixPath(self.target)
        own = next((place for name in _OWN if target.is_relative_to(place := _TREE / name)), _TREE)
        if ".." in target.parts or own != _TREE or _TREE.is_relative_to(target):
            raise UsageError(
                f"--volume {self.source}:{self.target}: the job has its own {own}. Fix: mount it elsewhere, or use"
                f" --channel NAME={self.source} for data"
            )

    def to_mounts(self) -> Iterator[docker.types.Mount]:
        """Yields it in the form of Docker's SDK. If it is read-only, each file system that is mounted in it follows.

        Docker before 25 makes only the topmost file system read-only.
        """
        source = self.source.resolve()
        for place in (source, *(list_mounts(source) if self.read_only else ())):
            target = str(PurePosixPath(self.target, place.relative_to(source)))
            yield docker.types.Mount(target, str(place), type="bind", read_only=self.read_only)


def list_mounts(directory: Path, table: Path = Path("/proc/self/mountinfo")) -> list[Path]:
    """Returns the places below a directory at which file systems of this machine are mounted; none without /proc."""
    try:
        lines = os.fsdecode(table.read_bytes()).splitlines()
    except OSError:
        return []
    words = (re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), line.split(" ")[4]) for line in lines)
    found = {Path(word) for word in words}
    return sorted(place for place in found if directory in place.parents and os.path.lexists(place))
