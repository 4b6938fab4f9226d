"""Notices changes in the source of a job, and in its files of variables and secrets, for `shoal run --watch`.

It compares names, times and sizes again and again. So it finds what every editor writes, on every file system, and only
files that would be copied. Until the times of directories change, it looks at known files only.
"""

from __future__ import annotations

import contextlib
import fnmatch
import re
import stat
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal.errors import UsageError
from shoal.jobs.source_files import Selection, list_source, matches
from shoal.limits import MOST_LOCK, read_file

_PAUSE, _SHARE, _LONGEST_PAUSE = 0.1, 0.02, 1.0
"""Seconds between two looks, the share of a processor that they take, and the longest pause, which counts more."""
_QUIET = 0.06
"""Seconds without another change after which an editor, or git, has written all files."""
_OF_EDITORS = (
    *(".*.sw?", "*~", ".#*", "#*#", "4913", ".DS_Store", "*.pyc", ".idea/", ".vscode/", ".ipynb_checkpoints/"),
    *(".pytest_cache/", ".mypy_cache/", ".ruff_cache/"),
)
"""Files that editors and tools write beside the code. They are copied, but no change of them starts a run."""

_LONGEST, _MOST_STARS, _MOST_PATTERNS = 256, 2, 1000
"""Limits of patterns that others may have written: letters, stars of a part, and patterns. The rest is left out."""

_EDITED = (".py", ".pyi", ".sh", ".yaml", ".yml", ".toml", ".cfg", ".ini")
"""Ends of the names of files that people edit, and jobs rarely write."""

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

    def wait(self, ended: threading.Event | None = None) -> list[str]:
        """Waits for a change, and until nothing changes any more. Returns the names, with `new` or `removed`.

        After `ended` is set, it returns an empty list.
        """
        ended = ended or threading.Event()
        pause = 0.0
        while not ended.wait(pause):
            began = time.monotonic()
            changed = self.find(ended) if self._may_have_changed() else []
            if changed and not ended.is_set():
                return changed
            pause = _pause_since(began, _PAUSE)
        return []

    def find(self, ended: threading.Event | None = None) -> list[str]:
        """Returns the files that have changed since the last look, once nothing changes any more, or `ended` is set."""
        ended = ended or threading.Event()
        began = time.monotonic()
        before, found = self._files, self._read()
        while found != before and not ended.wait(_pause_since(began, _QUIET)):
            began = time.monotonic()
            if (again := self._read()) == found:
                break
            found = again
        self._files = found
        return list(_compare(before, found))

    def _may_have_changed(self) -> bool:
        now = {name: self._stamp_file(name) for name in self._files}
        return now != self._files or any(_stamp(Path(name)) != old for name, old in self._directories.items())

    def _stamp_file(self, name: str) -> Stamp:
        # A file outside the source may be behind a link.
        return _stamp(self._place(name), name.startswith("/"))

    def _place(self, name: str) -> Path:
        return self.selection.directory / name if self.selection else Path(name)  # an absolute name stays as it is

    def _read(self) -> dict[str, Stamp]:
        """Returns the stamps of all files."""
        found = {name: self._stamp_file(name) for name in (str(path.absolute()) for path in self.others)}
        if self.selection is None:
            return found
        try:
            return found | self._read_source(self.selection)
        except UsageError:  # it is being written, or the next run tells why
            return {**{name: self._stamp_file(name) for name in self._files}, _SOURCE: (1,)}

    def _read_source(self, selection: Selection) -> dict[str, Stamp]:
        top, found = selection.directory, {}
        ignored = _read_ignored(top)
        directories = {str(top): _stamp(top)}
        for each in list_source(selection):
            if each.left_out or _is_ignored(ignored, each.name):
                continue
            if stat.S_ISDIR(each.mode):
                directories[str(top / each.name)] = _stamp(top / each.name)
            elif not any(matches(pattern, each.name) for pattern in _OF_EDITORS):
                found[each.name] = _stamp(top / each.name)
        self._directories = directories
        return found


def _pause_since(began: float, shortest: float) -> float:
    """Returns the seconds to wait after a look, so that looks take a small share of a processor."""
    return min(max(shortest, (time.monotonic() - began) / _SHARE), _LONGEST_PAUSE)


def may_be_edits(changed: Iterable[str]) -> bool:
    """Returns whether somebody may have edited one of these files. Otherwise a job that wrote meanwhile has done it."""
    names = [name.split(" ")[0] for name in changed]
    return any(name in (_SOURCE, "requirements.txt") or name.endswith(_EDITED) for name in names)


def _stamp(path: Path, follow: bool = False) -> Stamp:
    try:
        found = path.stat(follow_symlinks=follow)
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


@dataclass(frozen=True)
class _Pattern:
    """A pattern of .gitignore or .dockerignore."""

    parts: Sequence[re.Pattern[str] | None]
    """Expressions for the names of a path; None stands for any number of names."""
    negated: bool

    @classmethod
    def parse(cls, text: str) -> _Pattern | None:
        """Returns None for a pattern that has no meaning, or would take long."""
        words = [word for word in text.removeprefix("!").split("/") if word not in ("", ".")]
        stars = max((len(re.findall(r"\*+", word)) for word in words), default=0)
        if not words or len(text) > _LONGEST or stars > _MOST_STARS:
            return None
        try:
            parts = [None if word == "**" else re.compile(fnmatch.translate(word)) for word in words]
        except re.error:
            return None
        return cls(parts, text.startswith("!"))

    def matches(self, names: Sequence[str]) -> bool:
        """Returns whether it is about a path or a directory around it. The parts are compared once with each name."""
        ends = {0}
        for part in self.parts:
            if part is None:
                ends = set(range(min(ends), len(names) + 1))
            else:
                ends = {end + 1 for end in ends if end < len(names) and part.match(names[end])}
            if not ends:
                return False
        return True


def _is_ignored(patterns: Iterable[_Pattern], name: str) -> bool:
    """Returns whether the last pattern about a path names it without `!`."""
    names, found = name.split("/"), False
    for pattern in patterns:
        if pattern.negated == found and pattern.matches(names):
            found = not found
    return found


def _read_ignored(directory: Path) -> list[_Pattern]:
    """Returns the patterns of the files .dockerignore and .gitignore in a directory."""
    lines = _read_lines(directory / ".dockerignore")
    for line in _read_lines(directory / ".gitignore"):
        plain = line.removeprefix("!").rstrip("/")
        # As in git, a pattern without a slash is about every directory.
        place = plain if "/" in plain else f"**/{plain}"
        lines += [f"{'!' if line.startswith('!') else ''}{place}"] if plain else []
    return [pattern for pattern in map(_Pattern.parse, lines) if pattern]


def _read_lines(path: Path) -> list[str]:
    with contextlib.suppress(OSError, ValueError):
        text = read_file(path, MOST_LOCK).decode(errors="replace")
        lines = (line.strip() for line in text.splitlines())
        return [line for line in lines if line and not line.startswith("#")][:_MOST_PATTERNS]
    return []
