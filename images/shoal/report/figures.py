"""The figures of an analysed timeline in words: for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shoal.report.analysis import Analysis, RankReport
from shoal.report.intervals import length
from shoal.report.trace import Span

_TIMES = ((1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1, "ns"))
_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"))
_NONE = "–"

COLUMNS: tuple[tuple[str, str, Callable[[RankReport], str]], ...] = (
    ("rank", "", lambda of: str(of.rank.number)),
    ("host", "", lambda of: of.rank.host or _NONE),
    ("steps", "that are recorded", lambda of: str(of.steps or _NONE)),
    ("step", "median", lambda of: time(of.step_time)),
    ("communication", "in any collective", lambda of: time(length(of.communication))),
    ("exposed", "communication while the main thread does not compute", lambda of: time(length(of.exposed))),
    ("overlap", "1 − exposed / communication", lambda of: percent(of.overlap)),
    ("waiting", "the main thread is blocked", lambda of: time(of.waiting)),
    ("bytes", "given to collectives", lambda of: amount(of.bytes)),
    ("bandwidth", "bytes / communication", lambda of: bandwidth(of.bandwidth)),
    ("slowest operation", "", lambda of: _slowest(of.slowest)),
    ("comes last", "to how many collectives", lambda of: str(of.last_to)),
    ("behind the first", "mean over the collectives", lambda of: time(of.lateness)),
)
"""The table of the ranks: a column's name, what it is, and its text."""


def time(nanoseconds: int | None) -> str:
    """Return a duration with three digits and its unit."""
    return _NONE if nanoseconds is None else _scaled(nanoseconds, _TIMES)


def amount(count: int) -> str:
    """Return a number of bytes with three digits and its unit (MB: 10⁶ bytes)."""
    return _scaled(count, _BYTES) if count else _NONE


def bandwidth(value: float | None) -> str:
    """Return a bandwidth in GB/s (10⁹ bytes a second)."""
    return _NONE if value is None else f"{value:.3g} GB/s"


def percent(part: float | None) -> str:
    """Return a part of 1 as a percentage."""
    return _NONE if part is None else f"{part:.0%}"


def describe(span: Span) -> str:
    """Return what a span is, in lines: name, bytes, duration, bandwidth, dtype and engine."""
    bucket = f", bucket {span.args['bucket']}" if "bucket" in span.args else ""
    rate = f"{amount(span.bytes)} in {time(span.duration)}, {bandwidth(span.bytes / (span.duration or 1))}"
    details = ", ".join(str(span.args[key]) for key in ("dtype", "engine", "group") if key in span.args)
    return "\n".join(filter(None, (span.name + bucket, rate if span.bytes else time(span.duration), details)))


def headline(analysis: Analysis) -> Iterator[str]:
    """Yield the sentences that say what the timeline shows."""
    timeline, reports = analysis.timeline, analysis.ranks
    hosts = len({report.rank.host for report in reports})
    yield f"{_counted(len(reports), 'rank')} on {_counted(hosts, 'host')}, {time(timeline.end)}."
    total = sum(length(report.communication) for report in reports)
    if not total:
        yield "No communication is recorded."
        return
    exposed = sum(length(report.exposed) for report in reports)
    yield f"{1 - exposed / total:.0%} of the communication is hidden behind computation."
    if analysis.skew:
        yield _straggling(analysis)


def _straggling(analysis: Analysis) -> str:
    mean = time(analysis.skew // len(analysis.collectives))
    skew = f"the last rank begins a collective {mean} after the first, on average"
    if analysis.straggler is None:
        return f"No rank is a straggler: {skew}."
    late = next(report for report in analysis.ranks if report.rank.number == analysis.straggler)
    return (
        f"Rank {analysis.straggler} is the straggler: it comes last to {late.last_to} of "
        f"{_counted(len(analysis.collectives), 'collective')}, which is {analysis.shares[analysis.straggler]:.0%} of the "
        f"waiting for the last ({skew})."
    )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _slowest(span: Span | None) -> str:
    if span is None:
        return _NONE
    bucket = f" {span.args['bucket']}" if "bucket" in span.args else ""
    return f"{span.name}{bucket}: {time(span.duration)}"


def _scaled(value: float, units: tuple[tuple[float, str], ...]) -> str:
    size, unit = next(((size, unit) for size, unit in units if abs(value) >= size), units[-1])
    scaled = value / size
    digits = 0 if size == 1 else 2 if scaled < 10 else 1 if scaled < 100 else 0
    return f"{scaled:.{digits}f} {unit}"
