"""The report of a job as data: its result, plan, curves, settings and log, and its form as JSON in a page."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import pydantic

from shoal.errors import UsageError

PAGE = "report.html"
"""The name of the page in a job's directory."""
_MAX_BYTES = 4_700_000
"""The most bytes that the data of a page takes. The rest of 5 MB is for the program and the tables."""
_MAX_POINTS = 60_000  # of all curves
_MAX_CURVES = 2_000
_MAX_LINE = 4_000  # characters
_LINE_OVERHEAD = 26  # bytes of a line in JSON in addition to its text
_DATA = re.compile(r'<script type="application/json" id="job">(.*?)</script>', re.DOTALL)


class LogLine(NamedTuple):
    """A line of the log."""

    seconds: float
    """When it came, after the start of the job."""
    host: str
    rank: int | None
    """None: `train` or the launcher wrote it."""
    text: str


@dataclass(frozen=True)
class Curve:
    """Values of a metric over time."""

    name: str
    host: str
    rank: int | None
    times: Sequence[float]
    """In seconds after the start of the job."""
    values: Sequence[float]


@dataclass(frozen=True)
class JobReport:
    """All that the page of a job shows. Texts have masked secrets already."""

    name: str
    started: str
    """In UTC, such as 2026-01-31 12:00:00."""
    exit_code: int | None
    """None: the job was interrupted."""
    causes: Sequence[tuple[str, str]] = ()
    """Hosts, and the failure that they report. The first is the first cause."""
    summary: Sequence[tuple[str, str]] = ()
    """The rows of the table that `shoal run` prints."""
    plan: Sequence[tuple[str, str]] = ()
    reasons: Sequence[str] = ()
    """Why `train` has chosen this plan."""
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Names and values, by section."""
    restarts: Sequence[str] = ()
    metrics: Sequence[Curve] = ()
    usage: Sequence[Curve] = ()
    """CPU in percent of one core, and memory in MB, by host."""
    log: Sequence[LogLine] = ()
    omitted: int = 0
    """How many lines of the log are left out."""
    omitted_at: int = 0
    """The index in `log` before which they are left out."""


_REPORTS = pydantic.TypeAdapter(JobReport)


def encode_report(report: JobReport) -> str:
    """Return a report as JSON that can stand in a script element: no text in it can end the element."""
    return _REPORTS.dump_json(report).decode().replace("<", "\\u003c")


def read_report(path: Path) -> JobReport:
    """Return the report in a page, or in the page of a job's directory. Raises `UsageError` if there is none."""
    page = path / PAGE if path.is_dir() else path
    try:
        text = page.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(
            f"{page}: {error.strerror}. Fix: name the directory of a job that has ended, such as jobs/NAME"
        ) from error
    found = _DATA.search(text)
    try:
        return _REPORTS.validate_json(found[1] if found else "")
    except pydantic.ValidationError as error:
        raise UsageError(f"{page}: not the report of a job. Fix: name a report.html of `shoal run`") from error


def fit_report(report: JobReport) -> JobReport:
    """Return a report that fits into a page: curves with fewer points, and the log without its middle if necessary."""
    report = replace(report, metrics=_thin_curves(report.metrics), usage=_thin_curves(report.usage))
    other = len(encode_report(replace(report, log=())).encode())
    return _shorten_log(report, _MAX_BYTES - other)


def _thin_curves(curves: Sequence[Curve]) -> list[Curve]:
    """Return curves that have `_MAX_POINTS` points together. Points are left out at equal distances."""
    kept = curves[:_MAX_CURVES]
    most = max(_MAX_POINTS // max(len(kept), 1), 2)
    return [_thin_curve(curve, most) for curve in kept]


def _thin_curve(curve: Curve, most: int) -> Curve:
    step = -(-len(curve.times) // most)
    if step <= 1:
        return curve
    return replace(curve, times=curve.times[::step], values=curve.values[::step])


def _shorten_log(report: JobReport, budget: int) -> JobReport:
    """Leave out the middle of the log, so that its JSON takes at most `budget` bytes. Long lines are cut."""
    lines = [_cut_line(line) for line in report.log]
    sizes = [_LINE_OVERHEAD + len(line.host) + _encoded_size(line.text) for line in lines]
    if sum(sizes) <= budget:
        return replace(report, log=lines)
    # The part before lines that are left out already must stay apart from the part after them.
    split = report.omitted_at if report.omitted else len(lines) // 2
    head = _count_fitting(sizes[:split], budget // 2)
    tail = _count_fitting(sizes[split:][::-1], budget // 2)
    kept = lines[:head] + lines[len(lines) - tail :]
    return replace(report, log=kept, omitted=report.omitted + len(lines) - len(kept), omitted_at=head)


def _count_fitting(sizes: Sequence[int], budget: int) -> int:
    """Return how many of the first sizes have a sum of at most `budget`."""
    for count, size in enumerate(sizes):
        budget -= size
        if budget < 0:
            return count
    return len(sizes)


def _cut_line(line: LogLine) -> LogLine:
    more = len(line.text) - _MAX_LINE
    return line._replace(text=f"{line.text[:_MAX_LINE]}… ({more} characters more)") if more > 0 else line


def _encoded_size(text: str) -> int:
    """Return how many bytes a text takes at most in JSON without `<`. Most texts are plain, and quick to measure."""
    if text.isascii() and text.isprintable():
        return len(text) + text.count("\\") + text.count('"') + 5 * text.count("<")
    return (
        sum(len(char.encode("utf-8", "replace")) if char.isprintable() else 6 for char in text)
        + 5 * text.count("<")
        + text.count("\\")
        + text.count('"')
    )
