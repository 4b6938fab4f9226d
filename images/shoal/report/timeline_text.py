"""An analysed timeline in words: summary sentences, the columns of the table of ranks, descriptions of spans."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shoal.formats import NONE, format_bandwidth, format_bytes, format_count, format_percent, format_time
from shoal.report.timeline_analysis import Analysis, RankReport, length
from shoal.report.trace import Span


@dataclass(frozen=True)
class Column:
    """A column of the table of ranks."""

    name: str
    meaning: str
    text: Callable[[RankReport], str]
    on_terminal: bool = True
    """Whether it is printed on a terminal too, not only on the page."""


COLUMNS = (
    Column("rank", "", lambda of: str(of.rank.number)),
    Column("host", "", lambda of: of.rank.host or NONE, on_terminal=False),
    Column("steps", "recorded", lambda of: str(of.steps or NONE), on_terminal=False),
    Column("step", "median time", lambda of: format_time(of.step_time)),
    Column("computing", "share of steps", lambda of: _format_share(of, "computing"), on_terminal=False),
    Column("communicating", "share of steps, exposed", lambda of: _format_share(of, "exposed"), on_terminal=False),
    Column("idle", "share of steps, the rest", lambda of: _format_share(of, "idle")),
    Column("communication", "time in collectives", lambda of: format_time(length(of.communication))),
    Column("exposed", "while not computing", lambda of: format_time(length(of.exposed))),
    Column("overlap", "1 − exposed / communication", lambda of: format_percent(of.overlap)),
    Column("waiting", "main thread blocked", lambda of: format_time(of.waiting), on_terminal=False),
    Column("bytes", "passed to collectives", lambda of: format_bytes(of.bytes), on_terminal=False),
    Column("bandwidth", "bytes / communication", lambda of: format_bandwidth(of.bandwidth)),
    Column("slowest", "collective", lambda of: _format_slowest(of.slowest), on_terminal=False),
    Column("last", "to begin, number of collectives", lambda of: str(of.last_to)),
    Column("behind", "the first rank, mean", lambda of: format_time(of.lateness)),
)


def describe_span(span: Span) -> str:
    """Returns lines with a span's name, bytes, duration, bandwidth, dtype, communication engine and group."""
    bucket = f", bucket {span.args['bucket']}" if "bucket" in span.args else ""
    several = f"{span.args['spans']} spans, the longest " if "spans" in span.args else ""
    rate = f"{format_bytes(span.bytes)} in {format_time(span.duration)}, {format_bandwidth(span_bandwidth(span))}"
    details = ", ".join(str(span.args[key]) for key in ("dtype", "engine", "group") if key in span.args)
    lines = (several + span.name + bucket, rate if span.bytes else format_time(span.duration), details)
    return "\n".join(filter(None, lines))


def span_bandwidth(span: Span) -> float | None:
    """Returns a span's bandwidth in GB/s; None if it has no bytes or no duration."""
    return span.bytes / span.duration if span.bytes and span.duration else None


def summarize_timeline(analysis: Analysis) -> Iterator[str]:
    """Yields the sentences that summarize a timeline: ranks, steps, hidden communication, and skew if there is some.

    The number of steps and their duration are from the first rank. Hidden and exposed communication are of all ranks.
    Without communication, a sentence says so and is the last one.
    """
    reports = analysis.ranks
    hosts = len({report.rank.host for report in reports})
    steps, step_time = reports[0].steps, reports[0].step_time
    each = f", {format_count(steps, 'step')} of {format_time(step_time)} (median)" if steps else ""
    duration = format_time(analysis.timeline.end)
    yield f"{format_count(len(reports), 'rank')} on {format_count(hosts, 'host')}: {duration}{each}."
    total = sum(length(report.communication) for report in reports)
    if not total:
        yield "No communication was recorded."
        return
    exposed = sum(length(report.exposed) for report in reports)
    yield (
        f"{format_percent(1 - exposed / total)} of the communication is hidden behind computation; "
        f"the rest makes training {format_time(exposed // len(reports))} longer (mean over ranks)."
    )
    if analysis.skew:
        yield _summarize_skew(analysis)


def _summarize_skew(analysis: Analysis) -> str:
    mean = format_time(analysis.skew // len(analysis.collectives))
    skew = f"On average, the last rank begins a collective {mean} after the first"
    if analysis.straggler is None:
        return f"{skew}; no single rank causes most of the waiting."
    late = next(report for report in analysis.ranks if report.rank.number == analysis.straggler)
    share = format_percent(analysis.shares[analysis.straggler])
    return (
        f"{skew}. Rank {analysis.straggler} is the straggler: it is last in {late.last_to} of "
        f"{format_count(len(analysis.collectives), 'collective')} and causes {share} of the waiting."
    )


def _format_share(report: RankReport, name: str) -> str:
    return format_percent(getattr(report.shares, name, None))


def _format_slowest(span: Span | None) -> str:
    if span is None:
        return NONE
    bucket = f" {span.args['bucket']}" if "bucket" in span.args else ""
    return f"{span.name}{bucket}: {format_time(span.duration)}"
