"""The report of a job as data: its result, plan, curves, settings and log, and its form as JSON in a page."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pydantic

from shoal.errors import UsageError
from shoal.jobs.job_log import Line
from shoal.limits import MOST_PAGE, read_file
from shoal.report.packed_log import unpack_log

PAGE = "report.html"
"""The name of the page in a job's directory."""
_MAX_POINTS = 60_000  # of all curves
_MAX_CURVES = 2_000
_DATA = re.compile(r'<script type="application/json" id="job">(.*?)</script>', re.DOTALL)
_LOG = re.compile(r'<script type="text/plain" id="lines">(.*?)</script>', re.DOTALL)


@dataclass(frozen=True)
class Curve:
    """Values of a metric over time."""

    name: str
    host: str
    rank: int | None
    times: Sequence[float]
    """In seconds after the start of the job."""
    values: Sequence[float]
    xs: Sequence[float] = ()
    """The step or epoch of each value; empty if they are unknown."""
    x_name: str = ""
    """step or epoch."""
    marks: Sequence[tuple[float, float | None, str]] = ()
    """Values that are not finite: seconds, step or epoch, and nan, inf or -inf."""


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
    scalars: Sequence[Curve] = ()
    """The scalars in TensorBoard's event files. The directory of a file takes the place of a host."""
    usage: Sequence[Curve] = ()
    """CPU in percent of one core, and memory in MB, by host."""
    log: Sequence[Line] = ()
    omitted: int = 0
    """How many lines of the log are left out."""
    omitted_at: int = 0
    """The index in `log` before which they are left out."""


_REPORTS = pydantic.TypeAdapter(JobReport)


def encode_report(report: JobReport) -> str:
    """Returns a report without its log as JSON for a script element: no text in it can end the element."""
    return _REPORTS.dump_json(replace(report, log=())).decode().replace("<", "\\u003c")


def read_report(path: Path) -> JobReport:
    """Returns the report in a page, or in the page of a job's directory, with its log.

    Raises `UsageError` if there is none.
    """
    page = path / PAGE if path.is_dir() else path
    try:
        text = read_file(page, MOST_PAGE, follow=True).decode(errors="replace")
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{page}: {getattr(error, 'strerror', None) or error}."
            " Fix: name the directory of a job that has ended, such as jobs/NAME"
        ) from error
    found, packed = _DATA.search(text), _LOG.search(text)
    try:
        report = _REPORTS.validate_json(found[1] if found else "")
        return replace(report, log=unpack_log(packed[1])) if packed else report
    except ValueError as error:  # pydantic's are among them
        raise UsageError(f"{page}: not the report of a job. Fix: name a report.html of `shoal run`") from error


def thin_report(report: JobReport) -> JobReport:
    """Returns a report that fits into a page, without its log. Curves may have fewer points."""
    metrics, scalars, usage = map(_thin_curves, (report.metrics, report.scalars, report.usage))
    return replace(report, metrics=metrics, scalars=scalars, usage=usage, log=())


def _thin_curves(curves: Sequence[Curve]) -> list[Curve]:
    """Returns curves that have `_MAX_POINTS` points together. Points are left out at equal distances."""
    kept = curves[:_MAX_CURVES]
    most = max(_MAX_POINTS // max(len(kept), 1), 2)
    return [_thin_curve(curve, most) for curve in kept]


def _thin_curve(curve: Curve, most: int) -> Curve:
    step = -(-len(curve.times) // most)
    if step <= 1:
        return curve
    return replace(curve, times=curve.times[::step], values=curve.values[::step], xs=curve.xs[::step])
