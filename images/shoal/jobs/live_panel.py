"""The lines of the live view below the log: the job, its metrics, and the use of CPU, memory and GPUs by host."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rich.text import Text

from shoal.clean_text import clean_text
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
    """Return the panel as lines that fit on a terminal.

    Args:
        state: What to show.
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
    """Return the lines that stay on the terminal at the end: the last values of all metrics, and the time."""
    width = max(width - 4, 8)
    return _join([*_list_facts(state, width), *_flow(state.metrics, width, _MOST_ROWS)], width)


def format_duration(seconds: float) -> str:
    """Return a duration such as 1:02:03."""
    minutes, rest = divmod(int(max(seconds, 0)), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _list_facts(state: PanelState, width: int) -> Iterator[Text]:
    """Yield a rule with the job's name and time, and a row with hosts, ranks and lines."""
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
    """Return a name and its value, or the lowest and the highest value of several ranks. NaN counts as both."""
    low, high = (format_number(next(filter(math.isnan, values), choose(values))) for choose in (min, max))
    value = low if low == high else f"{low} … {high}"
    return Text.assemble((clean_text(name).replace("\n", " "), "dim"), " ", (value, "bold"))


def _list_hosts(usage: Mapping[str, Mapping[str, float]], rows: int) -> Iterator[Text]:
    """Yield a row for each host, with aligned values. Of too many hosts, the last row has the number of the others."""
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
    """Return a measured value with its unit. Memory is in MB."""
    if value is None:
        return ""
    memory = f"{value:.0f} MB" if value < 1000 else f"{value / 1000:,.1f} GB"
    return _FORMATS[name].format(memory if name in (MEMORY, GPU_MEMORY) else value)


def _flow(metrics: Mapping[str, Sequence[float]], width: int, rows: int) -> list[Text]:
    """Return rows with as many metrics as fit. The last row ends with the number of metrics that do not."""
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
    """Return rows that are cut at the width, as one text."""
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return Text("\n", no_wrap=True, overflow="ignore").join(lines)
