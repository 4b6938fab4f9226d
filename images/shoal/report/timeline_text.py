"""The figures of an analysed timeline in words, for the terminal and for the page; and how numbers are written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shoal.report.intervals import length
from shoal.report.timeline_analysis import Analysis, RankReport
from shoal.report.trace import Span

_TIMES = ((1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1, "ns"))
_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"))
_NONE = "–"


@dataclass(frozen=True)
class Column:
    """A column of the table of the ranks."""

    name: str
    what: str
    text: Callable[[RankReport], str]
    is_brief: bool = True
    """On a terminal too."""


COLUMNS = (
    Column("rank", "", lambda of: str(of.rank.number)),
    Column("host", "", lambda of: of.rank.host or _NONE, is_brief=False),
    Column("steps", "recorded", lambda of: str(of.steps or _NONE), is_brief=False),
    Column("step", "median", lambda of: time(of.step_time)),
    Column("idle", "of its steps, computing nothing", lambda of: percent(of.idle)),
    Column("communication", "in any collective", lambda of: time(length(of.communication))),
    Column("exposed", "while not computing", lambda of: time(length(of.exposed))),
    Column("overlap", "1 − exposed / communication", lambda of: percent(of.overlap)),
    Column("waiting", "main thread blocked", lambda of: time(of.waiting), is_brief=False),
    Column("bytes", "given to collectives", lambda of: amount(of.bytes), is_brief=False),
    Column("bandwidth", "bytes / communication", lambda of: bandwidth(of.bandwidth)),
    Column("slowest", "of its collectives", lambda of: _slowest(of.slowest), is_brief=False),
    Column("last", "to begin, collectives", lambda of: str(of.last_to)),
    Column("behind", "the first to begin, mean", lambda of: time(of.lateness)),
)


def time(nanoseconds: int | None) -> str:
    """Return a duration with three digits and its unit."""
    return _NONE if nanoseconds is None else _scaled(nanoseconds, _TIMES)


def amount(count: int) -> str:
    """Return a number of bytes with three digits and its unit (MB: 10⁶ bytes)."""
    return _scaled(count, _BYTES) if count else _NONE


def bandwidth(value: float | None) -> str:
    """Return a bandwidth in GB/s (10⁹ bytes a second)."""
    return _NONE if value is None else f"{value:#.3g} GB/s"


def percent(part: float | None) -> str:
    """Return a part of 1 as a percentage."""
    return _NONE if part is None else f"{part:.0%}"


def describe(span: Span) -> str:
    """Return what a span is, in lines: name, bytes, duration, bandwidth, dtype and engine."""
    bucket = f", bucket {span.args['bucket']}" if "bucket" in span.args else ""
    several = f"{span.args['spans']} spans, the longest " if "spans" in span.args else ""
    rate = f"{amount(span.bytes)} in {time(span.duration)}, {bandwidth(rate_of(span))}"
    details = ", ".join(str(span.args[key]) for key in ("dtype", "engine", "group") if key in span.args)
    return "\n".join(filter(None, (several + span.name + bucket, rate if span.bytes else time(span.duration), details)))


def rate_of(span: Span) -> float | None:
    """Return a span's bandwidth in GB/s; None where it has no bytes or takes no time."""
    return span.bytes / span.duration if span.bytes and span.duration else None


def headline(analysis: Analysis) -> Iterator[str]:
    """Yield the sentences that say what the timeline shows."""
    reports = analysis.ranks
    hosts = len({report.rank.host for report in reports})
    steps, step_time = reports[0].steps, reports[0].step_time
    each = f", {counted(steps, 'step')} of {time(step_time)} (median)" if steps else ""
    yield f"{counted(len(reports), 'rank')} on {counted(hosts, 'host')}: {time(analysis.timeline.end)}{each}."
    total = sum(length(report.communication) for report in reports)
    if not total:
        yield "No communication is recorded."
        return
    exposed = sum(length(report.exposed) for report in reports)
    yield (
        f"{percent(1 - exposed / total)} of the communication is hidden behind computation; "
        f"the rest makes the training {time(exposed // len(reports))} longer (mean of the ranks)."
    )
    if analysis.skew:
        yield _straggling(analysis)


def _straggling(analysis: Analysis) -> str:
    mean = time(analysis.skew // len(analysis.collectives))
    skew = f"The last rank begins a collective {mean} after the first, on average"
    if analysis.straggler is None:
        return f"{skew}; no rank is the one that the others wait for."
    late = next(report for report in analysis.ranks if report.rank.number == analysis.straggler)
    return (
        f"{skew}. Rank {analysis.straggler} is the straggler: it comes last to {late.last_to} of "
        f"{counted(len(analysis.collectives), 'collective')}, {percent(analysis.shares[analysis.straggler])} of that "
        "time."
    )


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural where it is not one."""
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
