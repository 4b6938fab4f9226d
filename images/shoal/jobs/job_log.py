"""Keeps the log of a job while it runs: its lines with time, host and rank, and the numbers that lines name.

Reads it from the job's directory, also while it grows.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO, NamedTuple

from shoal.clean_text import cut_line, print_error
from shoal.errors import UsageError
from shoal.jobs import running
from shoal.jobs.printed_metrics import LineReader, X, is_bar
from shoal.limits import MOST_LOG, MOST_LOG_LINE, open_regular

LOG = "log.jsonl"
"""The log of a job, one line of JSON for each line of a host."""
_HALF = 50_000
"""How many lines are kept of the beginning of the log, and of its end."""
MAX_SERIES = 2_000
_MAX_POINTS = 1_000  # of a series
_MAX_MARKS = 100  # of a series
_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*\x07)")


class Line(NamedTuple):
    """A line of the log."""

    seconds: float
    """When it came, after the start of the job."""
    host: str
    rank: int | None
    """None: `train`, the launcher or another program wrote it."""
    text: str


class Mark(NamedTuple):
    """A value that is NaN or infinite."""

    seconds: float
    x: float | None
    """Its step or epoch."""
    text: str
    """nan, inf or -inf."""


@dataclass
class Series:
    """Values of a name over time. If there are too many, every second one is dropped."""

    times: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))
    xs: array[float] = field(default_factory=lambda: array("d"))
    """The step or epoch of each value; empty if `x_name` is."""
    x_name: str = ""
    """step or epoch; empty if a value has none, or if they do not grow, as with several loops."""
    marks: list[Mark] = field(default_factory=list)
    """The first values that are not finite."""
    last_time: float = 0.0
    last: float = math.nan
    """The last value, also if it is dropped."""
    _step: int = 1
    _count: int = 0
    _last_x: float = -math.inf

    def add(self, seconds: float, value: float, x: X | None = None, *, redrawn: bool = False) -> None:
        """Adds a value, unless it is one of those that are dropped. `redrawn`: it replaces one of the same step."""
        self._check_x(x)
        self.last_time, self.last = seconds, value
        if redrawn and x and self.xs and self.xs[-1] == x.value and math.isfinite(value):
            self.times[-1], self.values[-1] = seconds, value
            return
        if not math.isfinite(value):
            if len(self.marks) < _MAX_MARKS:
                self.marks.append(Mark(seconds, x.value if x and self.x_name else None, str(value)))
            return
        if self._count % self._step == 0:
            self.times.append(seconds)
            self.values.append(value)
            if x and self.x_name:
                self.xs.append(x.value)
        self._count += 1
        if len(self.times) >= _MAX_POINTS:
            self.times, self.values, self._step = self.times[::2], self.values[::2], self._step * 2
            self.xs = self.xs[::2]

    def _check_x(self, x: X | None) -> None:
        """Keeps the name of the first step, or drops all steps if this one does not fit."""
        if x and self._last_x == -math.inf:
            self.x_name = x.name
        if x and x.name == self.x_name and x.value >= self._last_x:
            self._last_x = x.value
            return
        self._last_x = math.nan
        if self.x_name:
            self.x_name, self.xs = "", array("d")
            self.marks = [mark._replace(x=None) for mark in self.marks]


Key = tuple[str, str, int | None]
"""A name, a host and a rank."""


@dataclass
class JobLog:
    """The log of a job, in bounded memory: its first and last lines, and series of numbers. A file may get all lines.

    Threads may add lines at the same time.
    """

    began: float = field(default_factory=time.time)
    omitted: int = 0
    """How many lines between head and tail are not kept."""
    series: dict[Key, Series] = field(default_factory=dict)
    """The metrics that the script has printed."""
    defined: dict[Key, Series] = field(default_factory=dict)
    """The metrics of metric definitions, which `train` has found."""
    steps: dict[Key, float] = field(default_factory=dict)
    """The last step and epoch that the script has printed beside metrics."""
    usage: dict[Key, Series] = field(default_factory=dict)
    """CPU, memory and GPUs of hosts."""
    path: Path | None = None
    """The file that gets all lines. It is made for the first one.

    A line is `[seconds since 1970, host, text]`. With a rank, its own host and the rank follow.
    """
    _file: IO[str] | None = None
    _size: int = 0
    _head: list[Line] = field(default_factory=list)
    _tail: deque[Line] = field(default_factory=lambda: deque(maxlen=_HALF))
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _readers: dict[tuple[str, int | None], LineReader] = field(default_factory=dict)

    @property
    def last_values(self) -> dict[Key, float]:
        """The last values of metric definitions; without them, of printed metrics and steps."""
        last = {key: each.last for key, each in (self.defined or self.series).copy().items()}
        return last if self.defined else {**self.steps.copy(), **last}

    @property
    def not_finite(self) -> dict[Key, float]:
        """The metrics with a last value that is NaN or infinite."""
        series = {**self.series, **self.defined}
        return {key: each.last for key, each in series.items() if not math.isfinite(each.last)}

    @property
    def last_metrics(self) -> dict[str, float]:
        """The last value of each metric, of the lowest rank with a finite one.

        A metric definition replaces the printed metric of its name.
        """
        return {name: value for series in (self.series, self.defined) for name, value in _list_last(series)}

    @property
    def lines(self) -> list[Line]:
        """The lines that are kept. Others are left out before index `omitted_at`."""
        return [*self._head, *self._tail]

    @property
    def omitted_at(self) -> int:
        """The index in `lines` before which lines are left out."""
        return len(self._head)

    def add(
        self,
        source: str,
        text: str,
        host: str | None = None,
        rank: int | None = None,
        shown: str | None = None,
        has_metrics: bool = True,
    ) -> Line:
        """Adds a line that came now, and returns it without colours.

        Args:
            source: The host from which it came. It was written there, unless another `host` is named.
            shown: The line as a terminal shows it, if that is not the text itself.
            has_metrics: Whether its numbers may be metrics.
        """
        now = time.time()
        line = Line(round(now - self.began, 2), host or source, rank, cut_line(_ESCAPES.sub("", text)))
        origin = () if rank is None else (line.host, rank)
        with self._lock:
            self._write(json.dumps([round(now, 3), source, text if shown is None else shown, *origin]))
            if len(self._head) < _HALF:
                self._head.append(line)
            else:
                self.omitted += len(self._tail) == _HALF
                self._tail.append(line)
            if has_metrics:
                self._add_metrics(line)
        return line

    def add_metric(self, key: Key, value: float) -> None:
        """Adds a value of a metric definition that came now."""
        with self._lock:
            if key in self.defined or len(self.defined) < MAX_SERIES:
                self.defined.setdefault(key, Series()).add(round(time.time() - self.began, 2), value)

    def close(self) -> None:
        """Closes the file. Later lines are not written to it."""
        with self._lock:
            self.path = None
            if self._file:
                with contextlib.suppress(OSError):  # a full disk, of which `_write` has warned
                    self._file.close()

    def _write(self, line: str) -> None:
        """Writes a line to the file. Only its owner can read it. At an error or the limit, warns and writes no more."""
        if self.path is None:
            return
        try:
            if self._file is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
                self._file = os.fdopen(os.open(self.path, flags, 0o600), "w", buffering=1)
            self._size += self._file.write(line + "\n")
            if self._size > MOST_LOG:
                raise OSError(0, f"it has {MOST_LOG:,} bytes, the most that is kept")
        except OSError as error:  # a full disk must not end the job
            print_error(f"warning: {self.path} has no further lines: {error.strerror}")
            self.path = None

    def _add_metrics(self, line: Line) -> None:
        origin = line.host, line.rank
        if origin not in self._readers and len(self._readers) >= MAX_SERIES:
            return
        metrics, x = self._readers.setdefault(origin, LineReader()).read(line.text)
        redrawn = is_bar(line.text)
        if x and len(self.steps) < MAX_SERIES:
            self.steps[(x.name, *origin)] = x.value
        for name, value in metrics.items():
            key = (name, *origin)
            if key in self.series or len(self.series) < MAX_SERIES:
                self.series.setdefault(key, Series()).add(line.seconds, value, x, redrawn=redrawn)


def _list_last(series: Mapping[Key, Series]) -> Iterable[tuple[str, float]]:
    """Returns names and last values, the lowest ranks last. Series that end with NaN or infinity are left out."""
    finite = [(key, each.last) for key, each in series.items() if math.isfinite(each.last)]
    ordered = sorted(finite, key=lambda item: -1 if item[0][2] is None else item[0][2], reverse=True)
    return ((name, value) for (name, _, _), value in ordered)


_PAUSE = 0.2
"""Seconds between two looks at a log that grows."""
_MOST_LINE = 8 * MOST_LOG_LINE  # bytes; JSON writes up to six for one


@dataclass(frozen=True)
class LineFilter:
    """Which lines to show; None: all."""

    host: str | None = None
    rank: int | None = None

    def accepts(self, host: str, rank: int | None) -> bool:
        """Returns whether to show a line of a host and a rank."""
        return self.host in (None, host) and self.rank in (None, rank)


def read_lines(
    directory: Path, chosen: LineFilter, *, tail: int | None = None, follow: bool = False, timestamps: bool = False
) -> Iterator[str]:
    """Yields the lines of a job's log, each after the name of its host.

    Args:
        directory: The job's directory.
        chosen: Which lines to yield.
        tail: How many of the existing lines to yield, the last ones; None: all.
        follow: Whether to wait for further lines until the job has ended.
        timestamps: Whether a line begins with its time, in this machine's time zone.

    Raises:
        UsageError: If the log is not a file, but such as a link or a pipe.
    """
    path = directory / LOG
    while follow and not path.exists() and running.is_running(directory):
        time.sleep(_PAUSE)
    if not os.path.lexists(path):
        return
    try:
        opened = open_regular(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read: {error}. Fix: remove it") from error
    with opened as file:
        found = _read_whole(file, chosen, timestamps)
        yield from found if tail is None else deque(found, maxlen=tail)
        while follow:
            is_last = not running.is_running(directory)
            yield from _read_whole(file, chosen, timestamps)
            if is_last:
                return
            time.sleep(_PAUSE)


def _read_whole(file: IO[bytes], chosen: LineFilter, timestamps: bool) -> Iterator[str]:
    """A line that is still being written is left for the next call. Lines of another form are left out."""
    while True:
        place = file.tell()
        line = file.readline(_MOST_LINE)
        if not line.endswith(b"\n") and len(line) < _MOST_LINE:
            file.seek(place)
            return
        with contextlib.suppress(ValueError, TypeError, OverflowError, OSError, RecursionError):  # of another program
            at, source, text, *origin = json.loads(line)
            moment = datetime.fromtimestamp(at)
            host, rank = origin or (source, None)
            if chosen.accepts(host, rank):
                yield f"{f'{moment:%Y-%m-%d %H:%M:%S} ' if timestamps else ''}{source} | {text}"
