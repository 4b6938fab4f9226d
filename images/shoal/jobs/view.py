"""Shows a running job on a terminal: its log, which scrolls, and below it a panel that a thread keeps up to date.

Elsewhere, a plain view prints each line of the log as it comes.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rich.console import Console, ConsoleOptions
from rich.control import Control
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from shoal.clean_text import COLORS, clean_log_line, clean_text
from shoal.console import LogLines, print_log_lines
from shoal.jobs.job_log import JobLog, Line
from shoal.jobs.summary import format_number
from shoal.jobs.usage import CPU, GPU, GPU_MEMORY, MEMORY

_GAP = "   "
_LEAST_ROWS, _MOST_ROWS = 4, 20
_FORMATS = {CPU: "CPU {:,.0f} %", MEMORY: "memory {}", GPU: "GPU {:.0f} %", GPU_MEMORY: "{}"}


@dataclass(frozen=True)
class PanelState:
    """All that the panel shows."""

    name: str
    hosts: str
    """Their number, or a range such as 2:4."""
    ranks: int
    seconds: float
    """Since the start of the job."""
    lines: int
    """How many lines the log has."""
    metrics: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """The last value of each rank, by name."""
    progress: str = ""
    """The progress bar of the script, without control characters."""
    usage: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """The last measured values of each host, by the names in `usage`."""


def render_panel(state: PanelState, width: int, height: int) -> Text:
    """Returns the panel as lines that fit on a terminal.

    Args:
        width: Columns of the terminal. The last ones stay free, so that an echoed ^C starts no new line.
        height: Rows of the terminal, of which the panel takes at most half.
    """
    width = max(width - 4, 8)
    rows = max(height // 2, _LEAST_ROWS) - 2
    hosts = list(_list_hosts(state.usage, max(rows // 2, 1)))
    progress = [Text(state.progress)] if state.progress and rows > len(hosts) + 1 else []
    metrics = _flow(state.metrics, width, max(rows - len(hosts) - len(progress), 1))
    return _join([*_list_facts(state, width), *progress, *metrics, *hosts], width)


def render_result(state: PanelState, width: int) -> Text:
    """Returns the lines that stay on the terminal at the end: the last values of all metrics, and the time."""
    width = max(width - 4, 8)
    return _join([*_list_facts(state, width), *_flow(state.metrics, width, _MOST_ROWS)], width)


def format_duration(seconds: float) -> str:
    """Returns a duration such as 1:02:03."""
    minutes, rest = divmod(int(max(seconds, 0)), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _list_facts(state: PanelState, width: int) -> Iterator[Text]:
    time = format_duration(state.seconds)
    name = Text(clean_text(state.name), style="bold")
    name.truncate(max(width - len(time) - 8, 4), overflow="ellipsis")
    rule = "─" * max(width - name.cell_len - len(time) - 7, 1)
    yield Text.assemble(("── ", "dim"), name, (f" {rule} ", "dim"), time, (" ─", "dim"))
    counts = (_count(state.hosts, "host"), _count(state.ranks, "rank"), _count(f"{state.lines:,}", "line"))
    yield Text(" · ".join(counts) + " of log")


def _count(number: object, noun: str) -> str:
    return f"{number} {noun}" if str(number) == "1" else f"{number} {noun}s"


def _format_metric(name: str, values: Sequence[float]) -> Text:
    """Returns a name and its value, or the lowest and the highest value of several ranks. NaN counts as both."""
    low, high = (format_number(next(filter(math.isnan, values), choose(values))) for choose in (min, max))
    value = low if low == high else f"{low} … {high}"
    return Text.assemble((clean_text(name).replace("\n", " "), "dim"), " ", (value, "bold"))


def _list_hosts(usage: Mapping[str, Mapping[str, float]], rows: int) -> Iterator[Text]:
    """Yields a row for each host, with aligned values. Of too many hosts, the last row has the number of the others."""
    shown = list(usage.items())[: rows if len(usage) <= rows else max(rows - 1, 0)]
    table = [[clean_text(host), *map(_format_usage, _FORMATS, map(values.get, _FORMATS))] for host, values in shown]
    widths = [max(map(len, column)) for column in zip(*table)]
    for host, *values in table:
        cells = (value.rjust(width) for value, width in zip(values, widths[1:]) if width)
        yield Text.assemble((host.ljust(widths[0]), "dim"), _GAP, _GAP.join(cells))
    if len(usage) > len(shown):
        others = [values[CPU] for values in list(usage.values())[len(shown) :] if CPU in values]
        mean = f", CPU {sum(others) / len(others):,.0f} % on average" if others else ""
        yield Text(f"{len(usage) - len(shown)} more hosts{mean}", style="dim")


def _format_usage(name: str, value: float | None) -> str:
    """Returns a measured value with its unit. Memory is in MB."""
    if value is None:
        return ""
    memory = f"{value:.0f} MB" if value < 1000 else f"{value / 1000:,.1f} GB"
    return _FORMATS[name].format(memory if name in (MEMORY, GPU_MEMORY) else value)


def _flow(metrics: Mapping[str, Sequence[float]], width: int, rows: int) -> list[Text]:
    """Returns rows with as many metrics as fit. The last row ends with the number of metrics that do not."""
    lines: list[Text] = []
    for count, (name, values) in enumerate(metrics.items()):
        cell = _format_metric(name, values)
        if lines and lines[-1].cell_len + len(_GAP) + cell.cell_len <= width:
            lines[-1].append(_GAP).append_text(cell)
        elif len(lines) < rows:
            lines.append(cell)
        else:
            lines[-1].truncate(max(width - 14, 4), overflow="ellipsis")
            lines[-1].append(f"{_GAP}{len(metrics) - count} more", style="dim")
            break
    return lines


def _join(lines: Sequence[Text], width: int) -> Text:
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return Text("\n", no_wrap=True, overflow="ignore").join(lines)


_PANEL_SECONDS = 1.0
"""How long a panel is shown before it is rendered again. Usage is measured as often."""
_FASTEST, _SLOWEST = 0.1, 0.5  # seconds between two writes to the terminal
_MAX_SHARE = 0.005
"""The part of a core that the view takes, as long as it need not write less often than every `_SLOWEST` seconds."""
_MAX_WAITING = 50_000  # lines
_KEPT = 500  # lines that are written again after a change of the terminal's size


class View(Protocol):
    """A place for the log of a job."""

    console: Console
    """The console for other messages."""
    is_live: bool
    """Whether all that is written to the terminal must come through this view."""

    def add(self, shown: str, line: Line, is_overwritten: bool = False) -> None:
        """Shows a line. If it `is_overwritten`, it is a progress bar that a terminal overwrites by the next line."""


@dataclass
class PlainView:
    """Prints each line of the log as it comes."""

    console: Console
    is_live: bool = False

    def add(self, shown: str, line: Line, is_overwritten: bool = False) -> None:
        """Prints a line, also one that a terminal would overwrite."""
        try:
            print_log_lines([shown], self.console)
        except (OSError, SystemExit):  # no reader, or a full disk: the job goes on, and its log has all lines
            self.console.quiet = True


def can_show_panel(console: Console, environment: Mapping[str, str]) -> bool:
    """Returns whether a console is a terminal that obeys control sequences, and neither CI nor NO_COLOR is set."""
    is_ci = environment.get("CI", "").lower() not in ("", "0", "false")
    return console.file.isatty() and not (console.is_dumb_terminal or is_ci or environment.get("NO_COLOR"))


@dataclass
class LiveView:
    """Shows the log and a panel on a terminal. Use it as a context manager.

    Threads may add lines at the same time. A thread writes them, so that no reader waits for the terminal. If the
    terminal is slower than the job, older lines are not shown, and a line says so.
    """

    console: Console
    log: JobLog
    name: str
    hosts: str
    """The number of hosts, or a range."""
    ranks: int
    """The number of ranks, if the log does not show more of them."""
    is_live: bool = True
    _waiting: deque[tuple[str, Line, bool]] = field(default_factory=deque)
    _added: int = 0
    _skipped: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _changed: threading.Event = field(default_factory=threading.Event)
    _ended: threading.Event = field(default_factory=threading.Event)
    _shown: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _progress: str = ""
    _panel_time: float = 0.0

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._write_lines, name="live view", daemon=True)

    def __enter__(self) -> LiveView:
        self._size = self.console.size
        self._live = self._start_live()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Writes the lines that still wait, and replaces the panel by the last values of the metrics."""
        self._ended.set()
        self._changed.set()
        try:
            self._thread.join()
            self._live.update(render_result(self._describe(), self.console.width))
        finally:  # also after an interrupt: the cursor is hidden until then
            with contextlib.suppress(OSError):  # the terminal has gone
                self._live.stop()

    def _start_live(self) -> Live:
        live = Live("", console=self.console, auto_refresh=False, redirect_stderr=sys.stderr.isatty())
        live.start()
        return live

    def add(self, shown: str, line: Line, is_overwritten: bool = False) -> None:
        """Shows a line of the log soon; in the panel if it is a progress bar."""
        with self._lock:
            self._added += 1
            if len(self._waiting) == _MAX_WAITING:
                self._waiting.popleft()
                self._skipped += 1
            self._waiting.append((shown, line, is_overwritten))
        self._changed.set()

    def _write_lines(self) -> None:
        """Body of a thread: writes lines and the panel until the view ends, or the terminal has gone."""
        with contextlib.suppress(OSError):
            while not self._ended.is_set():
                self._changed.wait(_PANEL_SECONDS)
                self._changed.clear()
                before = time.thread_time()
                self._write()
                cost = time.thread_time() - before
                self._ended.wait(min(max(_FASTEST, cost / _MAX_SHARE), _SLOWEST))
            self._write()

    def _write(self) -> None:
        """Writes the lines that wait, and the panel if it is old or the size of the terminal has changed."""
        with self._lock:
            waiting, self._waiting = self._waiting, deque()
            skipped, self._skipped = self._skipped, 0
        text = "".join(f"{clean_log_line(shown)}\n" for shown, _, is_overwritten in waiting if not is_overwritten)
        if waiting:
            shown, _, is_overwritten = waiting[-1]
            self._progress = COLORS.sub("", clean_log_line(shown)) if is_overwritten else ""
        if skipped:
            text = f"… {skipped:,} lines are not shown, because the terminal is slower than the job\n{text}"
        self.ranks = max([self.ranks, *(line.rank + 1 for _, line, _ in waiting if line.rank is not None)])
        self._shown.extend(text.splitlines(keepends=True)[-_KEPT:])
        now = time.monotonic()
        is_resized = self.console.size != self._size
        if is_resized:
            self._size = self.console.size
            text = "".join([*self._shown][-self._size.height :])
            self._clear()
        with self.console:  # one write for all of it
            if text:
                self.console.print(LogLines(text), soft_wrap=True, end="")
            if is_resized or now - self._panel_time >= _PANEL_SECONDS:
                self._panel_time = now
                panel = render_panel(self._describe(), *self._size)
                self._live.update(_Raw([*self.console.render(panel)]), refresh=True)

    def _clear(self) -> None:
        """Clears the terminal, because its lines may be wrapped in another way now. The log above it stays as it is."""
        self._live.stop()
        self.console.control(Control.home())
        self.console.file.write("\x1b[J")
        self._live = self._start_live()

    def _describe(self) -> PanelState:
        seconds = time.time() - self.log.began
        metrics: dict[str, list[float]] = {}
        for (name, _, _), value in self.log.last_values.items():
            metrics.setdefault(name, []).append(value)
        usage: dict[str, dict[str, float]] = {}
        measured = self.log.usage.copy()
        newest = max((series.last_time for series in measured.values()), default=0.0)
        for (name, host, _), series in sorted(measured.items(), key=lambda item: (len(item[0][1]), item[0][1])):
            if series.last_time == newest:  # otherwise the host does not run any more
                usage.setdefault(host, {})[name] = series.last
        return PanelState(self.name, self.hosts, self.ranks, seconds, self._added, metrics, self._progress, usage)


@dataclass(frozen=True)
class _Raw:
    """Segments that the console writes as they are."""

    segments: Sequence[Segment]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        yield from self.segments
