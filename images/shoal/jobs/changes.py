"""Notices changes in the source of a job, and in its files of variables and secrets, for `shoal run --watch`.

It compares names, times and sizes again and again. So it finds what every editor writes, on every file system, and only
files that would be copied. Until the times of directories change, it looks at known files only.
"""

from __future__ import annotations

import contextlib
import stat
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from docker.utils.build import PatternMatcher

from shoal.errors import UsageError
from shoal.jobs.source_files import Selection, list_source, matches
from shoal.limits import MOST_LOCK, read_file

_PAUSE, _SHARE = 0.1, 0.02
"""Seconds between two looks, and the largest share of a processor that they take."""
_QUIET = 0.06
"""Seconds without another change after which an editor, or git, has written all files."""
_OF_EDITORS = (
    *(".*.sw?", "*~", ".#*", "#*#", "4913", ".DS_Store", "*.pyc", ".idea/", ".vscode/", ".ipynb_checkpoints/"),
    *(".pytest_cache/", ".mypy_cache/", ".ruff_cache/"),
)
"""Files that editors and tools write beside the code. They are copied, but no change of them starts a run."""

_LONGEST, _MOST_STARS = 256, 6
"""Limits of a pattern that others may have written: expressions with many stars take minutes. Others are left out."""

_SOURCE = "."
"""The name of a source that cannot be read."""

Stamp = tuple[int, ...]
"""Time, size, number and permissions of a file."""


@dataclass
class Changes:
    """Finds the files that have changed since the last look."""

    selection: Selection | None
    """The source; None if the image has the code."""
    others: tuple[Path, ...] = ()
    """More files."""
    _files: dict[str, Stamp] = field(default_factory=dict)
    _directories: dict[str, Stamp] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._files = self._read()

    def wait(self) -> list[str]:
        """Waits for a change, and until nothing changes any more. Returns the names, with `new` or `removed`."""
        while True:
            began = time.monotonic()
            if self._may_have_changed() and (changed := self.find()):
                return changed
            time.sleep(max(_PAUSE, (time.monotonic() - began) / _SHARE))

    def find(self) -> list[str]:
        """Returns the files that have changed since the last look, once nothing changes any more."""
        before, found = self._files, self._read()
        while found != before:
            time.sleep(_QUIET)
            if (again := self._read()) == found:
                break
            found = again
        self._files = found
        return list(_compare(before, found))

    def _may_have_changed(self) -> bool:
        now = {name: _stamp(self._place(name)) for name in self._files}
        return now != self._files or any(_stamp(Path(name)) != old for name, old in self._directories.items())

    def _place(self, name: str) -> Path:
        return self.selection.directory / name if self.selection else Path(name)  # an absolute name stays as it is

    def _read(self) -> dict[str, Stamp]:
        """Returns the stamps of all files."""
        found = {name: _stamp(Path(name)) for name in (str(path.absolute()) for path in self.others)}
        if self.selection is None:
            return found
        try:
            return found | self._read_source(self.selection)
        except UsageError:  # it is being written, or the next run tells why
            return {**{name: _stamp(self._place(name)) for name in self._files}, _SOURCE: (1,)}

    def _read_source(self, selection: Selection) -> dict[str, Stamp]:
        top, found = selection.directory, {}
        ignored = _read_ignored(top)
        directories = {str(top): _stamp(top)}
        for each in list_source(selection):
            if each.left_out or ignored.matches(each.name):  # type: ignore[arg-type]  # the stub is wrong
                continue
            if stat.S_ISDIR(each.mode):
                directories[str(top / each.name)] = _stamp(top / each.name)
            elif not any(matches(pattern, each.name) for pattern in _OF_EDITORS):
                found[each.name] = _stamp(top / each.name)
        self._directories = directories
        return found


def _stamp(path: Path) -> Stamp:
    try:
        found = path.lstat()
    except OSError:
        return ()
    # The time of a change of the inode also shows files with an old time, such as those that `mv` puts there.
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_mode


def _compare(before: Mapping[str, Stamp], now: Mapping[str, Stamp]) -> Iterable[str]:
    for name in sorted({*before, *now}):
        if name == _SOURCE and before.get(name) != now.get(name):
            yield name
        elif not now.get(name) and before.get(name):
            yield f"{name} (removed)"
        elif not before.get(name) and now.get(name):
            yield f"{name} (new)"
        elif before.get(name) != now.get(name):
            yield name


def _read_ignored(directory: Path) -> PatternMatcher:
    """Returns the patterns of the files .dockerignore and .gitignore in a directory."""
    patterns = [line for line in _read_lines(directory / ".dockerignore") if not line.startswith("#")]
    for line in _read_lines(directory / ".gitignore"):
        negated, plain = line.startswith("!"), line.removeprefix("!").rstrip("/")
        if plain and not plain.startswith("#"):
            # As in git, a pattern without a slash is about every directory. Docker's `**/` stands for at least one.
            places = [plain.lstrip("/")] if "/" in plain else [plain, f"**/{plain}"]
            patterns += [f"{'!' if negated else ''}{place}" for place in places]
    return PatternMatcher(patterns)


def _read_lines(path: Path) -> list[str]:
    with contextlib.suppress(OSError, ValueError):
        text = read_file(path, MOST_LOCK).decode(errors="replace")
        lines = [line.strip() for line in text.splitlines()]
        return [line for line in lines if line and len(line) <= _LONGEST and line.count("*") <= _MOST_STARS]
    return []
