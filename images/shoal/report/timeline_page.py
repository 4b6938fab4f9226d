"""`shoal timeline`: reads the timelines of a job's ranks, and writes an HTML page and a merged trace.

The page is one self-contained file, from timeline.html.j2. In its pictures, a window of time becomes 0 to `UNITS`
horizontally, and rows become pixels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from shoal.console import print_line
from shoal.formats import format_bandwidth, format_bytes, format_time
from shoal.report import output_files, timeline_text, trace
from shoal.report.output_files import render_page
from shoal.report.timeline_analysis import Analysis, Interval, RankReport, analyse, clip, length, list_caveats
from shoal.report.trace import Span, Timeline

UNITS = 10_000
"""The width of a picture; the browser stretches it."""

_ROWS = ("compute", "communication", "wait")
_ROW, _GAP, _RANK_GAP = 15, 3, 12  # pixels
_MAX_BARS = 40_000  # per picture; browsers draw more too slowly
_MAX_TICKS = 10
_LETTER = UNITS / 130  # the width of a letter, in a browser window of usual width


@dataclass(frozen=True)
class Bar:
    """A rectangle. `kind` is its CSS class."""

    kind: str
    x: float
    width: float
    y: int
    title: str
    label: str = ""


@dataclass(frozen=True)
class Picture:
    """The picture of a window of time, which is in nanoseconds since the timeline began."""

    title: str
    begin: int
    end: int
    height: int
    rows: tuple[tuple[int, str, str], ...]
    """Each row's y, its rank (on the rank's first row only) and its name."""
    bars: tuple[Bar, ...]
    marks: tuple[Bar, ...]
    ticks: tuple[tuple[float, str], ...]
    """Each tick's x and text."""


def render_timeline_page(analysis: Analysis) -> str:
    """Returns the page of a timeline as HTML: summary, caveats, a table of ranks and pictures. Writes no file."""
    return render_page(
        "timeline.html.j2",
        analysis=analysis,
        summary=list(timeline_text.summarize_timeline(analysis)),
        caveats=list(list_caveats(analysis)),
        pictures=[_make_picture(analysis, title, window) for title, window in _choose_windows(analysis.timeline)],
        columns=timeline_text.COLUMNS,
        format_bandwidth=format_bandwidth,
        format_bytes=format_bytes,
        format_time=format_time,
        span_bandwidth=timeline_text.span_bandwidth,
        row=_ROW,
        units=UNITS,
        kinds=_list_kinds(analysis.timeline),
    )


def make_ticks(width: int) -> Iterator[tuple[int, str]]:
    """Yields round times from 0 to `width`, in nanoseconds, each with its text.

    After 0, there are at most `_MAX_TICKS`. All have the same unit.
    """
    step = next(
        step for power in range(20) for step in (10**power, 2 * 10**power, 5 * 10**power) if step * _MAX_TICKS >= width
    )
    size, unit = next(
        (size, unit) for size, unit in ((10**9, "s"), (10**6, "ms"), (1000, "µs"), (1, "ns")) if step >= size
    )
    for at in range(0, width + 1, step):
        yield at, f"{at // size} {unit}"


def find_steps(timeline: Timeline) -> list[Interval]:
    """Returns the training steps, each from the first rank's begin to the last rank's end.

    There are as many as the rank with the fewest recorded; ranks without steps do not count. If no steps were recorded,
    a step lasts from one begin of the first rank's most frequent collective to the next.
    """
    recorded = [rank.spans_of("step") for rank in timeline.ranks]
    if any(recorded):
        together = zip(*filter(None, recorded), strict=False)
        return [(min(span.begin for span in spans), max(span.end for span in spans)) for spans in together]
    spans = timeline.ranks[0].spans_of("communication")
    if not spans:
        return []
    most, _ = Counter(_collective_key(span) for span in spans).most_common(1)[0]
    begins = [span.begin for span in spans if _collective_key(span) == most]
    return list(zip(begins, begins[1:], strict=False))


def _choose_windows(timeline: Timeline) -> Iterator[tuple[str, Interval]]:
    yield "The whole recording", (0, timeline.end)
    numbered = sorted(enumerate(find_steps(timeline), 1), key=lambda step: step[1][1] - step[1][0])
    if len(numbered) > 2:
        for name, (number, (begin, end)) in (
            ("The median step", numbered[len(numbered) // 2]),
            ("The longest step", numbered[-1]),
        ):
            yield f"{name}: number {number}, at {format_time(begin)}", (begin, end)


def _make_picture(analysis: Analysis, title: str, window: Interval) -> Picture:
    """Returns the picture of a window, with three rows per rank. Spans too short to see are joined."""
    begin, end = window
    ranks = analysis.ranks
    shortest = (end - begin) * len(ranks) * len(_ROWS) // _MAX_BARS
    height_of_rank = len(_ROWS) * (_ROW + _GAP) + _RANK_GAP
    bars: list[Bar] = []
    marks: list[Bar] = []
    rows = []
    for place, report in enumerate(ranks):
        for line, category in enumerate(_ROWS):
            y = place * height_of_rank + line * (_ROW + _GAP) + _RANK_GAP // 2
            rows.append((y, f"rank {report.rank.number}" if line == 0 else "", category))
            bars += _make_bars(report, category, window, y, shortest)
        marks += (_place(mark, window, y - _ROW - _GAP) for mark in _choose_marks(report, window))
    return Picture(
        title=title,
        begin=begin,
        end=end,
        height=height_of_rank * len(ranks),
        rows=tuple(rows),
        bars=tuple(bars),
        marks=tuple(marks),
        ticks=tuple((at * UNITS / (end - begin or 1), text) for at, text in make_ticks(end - begin)),
    )


def _make_bars(report: RankReport, category: str, window: Interval, y: int, shortest: int) -> Iterator[Bar]:
    """Yields the bars of a row; spans shorter than `shortest` are joined. Exposed communication has bars on top."""
    spans = [span for span in report.rank.spans_of(category) if span.begin < window[1] and span.end > window[0]]
    for span in _join_short_spans(spans, shortest):
        parts = clip(report.exposed, span.begin, span.end) if category == "communication" else ()
        exposed = f"\n{format_time(length(parts))} of it exposed" if parts else ""
        yield _place(span, window, y, exposed)
        yield from (_place(Span("exposed", "", *part), window, y) for part in clip(parts, *window))


def _choose_marks(report: RankReport, window: Interval) -> Iterator[Span]:
    """Yields the instants of a window; none if there are more than 100, which would cover the bars."""
    instants = [mark for mark in report.rank.instants if window[0] <= mark.begin < window[1]]
    return iter(instants if len(instants) <= UNITS // 100 else ())


def _join_short_spans(spans: Iterable[Span], shortest: int) -> Iterator[Span]:
    """Makes one span of a run of neighbours that lasts less than `shortest` nanoseconds."""
    run: list[Span] = []
    for span in spans:
        if run and span.end - run[0].begin >= shortest:
            yield _join(run)
            run = []
        run.append(span)
    if run:
        yield _join(run)


def _join(run: Sequence[Span]) -> Span:
    if len(run) == 1:
        return run[0]
    longest, end = max(run, key=lambda span: span.duration), max(span.end for span in run)
    return replace(longest, begin=run[0].begin, end=end, args={"bytes": sum(s.bytes for s in run), "spans": len(run)})


def _place(span: Span, window: Interval, y: int, remark: str = "") -> Bar:
    scale = UNITS / (window[1] - window[0])
    begin, end = max(span.begin, window[0]), min(span.end, window[1])
    width = (end - begin) * scale
    return Bar(
        kind=_css_class(span),
        x=round((begin - window[0]) * scale, 2),
        width=round(width, 2),
        y=y,
        title=f"{timeline_text.describe_span(span)}{remark}\nat {format_time(span.begin)}",
        label=_choose_label(span, width),
    )


def _choose_label(span: Span, width: float) -> str:
    bucket = str(span.args.get("bucket", ""))
    full = f"{span.name} {bucket}".strip()
    if width >= len(full) * _LETTER:
        return full
    return bucket if width >= len(bucket) * _LETTER else ""


def _css_class(span: Span) -> str:
    return (
        span.name if span.category == "compute" and span.name in ("forward", "backward", "optimizer") else span.category
    )


def _list_kinds(timeline: Timeline) -> list[str]:
    present = {_css_class(span) for rank in timeline.ranks for span in rank.spans}
    return [
        kind for kind in ("forward", "backward", "optimizer", "compute", "communication", "wait") if kind in present
    ]


def _collective_key(span: Span) -> tuple[object, ...]:
    return span.name, span.args.get("bucket"), span.args.get("group")


def write_timeline_report(paths: Sequence[Path], output: Path, as_json: bool) -> tuple[Analysis, list[Path]]:
    """Writes the page, and with `as_json` the merged trace next to it.

    Args:
        paths: Timelines, or directories with timelines.

    Returns:
        The analysis, and the files that were written.

    Raises:
        UsageError: If a path does not exist, or a file cannot be written.
        TraceError: If a file is not a timeline, or files are from different jobs.
        DiskError: If the disk is full.
    """
    files = trace.find_files(paths)
    page, *others = output_files.choose_files(output, as_json, files)
    analysis = analyse(trace.read_timeline(files))
    texts = {page: render_timeline_page(analysis)}
    texts |= {other: trace.format_merged_trace(analysis.timeline) for other in others}
    output_files.write_files(output, texts)
    return analysis, list(texts)


def print_timeline_report(console: Console, analysis: Analysis) -> None:
    """Prints the summary, caveats and a table of the ranks."""
    for sentence in (*timeline_text.summarize_timeline(analysis), *list_caveats(analysis)):
        print_line(sentence, console)
    table = Table(box=None)
    columns = [column for column in timeline_text.COLUMNS if column.on_terminal]
    for column in columns:
        table.add_column(column.name, justify="right", no_wrap=True)
    for report in analysis.ranks:
        table.add_row(*(column.text(report) for column in columns))
    console.print(table, soft_wrap=True)
