"""The page of a timeline: one HTML file that needs no other, from timeline.html.j2.

Pictures are laid out here: times become 0 to `UNITS` along the window, and rows become pixels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import jinja2

from shoal.report import timeline_text
from shoal.report.intervals import Interval, clip, length
from shoal.report.timeline_analysis import Analysis, RankReport, notes
from shoal.report.trace import Span, Timeline

UNITS = 10_000
"""The width of a picture; the browser stretches it."""

_ROWS = ("compute", "communication", "wait")
_ROW, _GAP, _RANK_GAP = 15, 3, 12  # pixels
_MOST_BARS = 40_000  # of a picture: what a browser draws at once
_MOST_TICKS = 10
_LETTER = UNITS / 130  # of a label, in a window of the browser that is not small


@dataclass(frozen=True)
class Bar:
    """A rectangle; `kind` is its class in the style sheet."""

    kind: str
    x: float
    width: float
    y: int
    title: str
    label: str = ""


@dataclass(frozen=True)
class Picture:
    """A window of time, in nanoseconds since the timeline begins."""

    title: str
    begin: int
    end: int
    height: int
    rows: tuple[tuple[int, str, str], ...]
    """Their y, their rank (on its first row) and their name."""
    bars: tuple[Bar, ...]
    marks: tuple[Bar, ...]
    ticks: tuple[tuple[float, str], ...]
    """Their x and text."""


def render(analysis: Analysis) -> str:
    """Return the page."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("shoal.report", "."),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("timeline.html.j2").render(
        analysis=analysis,
        headline=list(timeline_text.headline(analysis)),
        notes=list(notes(analysis)),
        pictures=[_picture(analysis, title, window) for title, window in _windows(analysis.timeline)],
        columns=timeline_text.COLUMNS,
        text=timeline_text,
        row=_ROW,
        units=UNITS,
        kinds=_kinds(analysis.timeline),
    )


def ticks(width: int) -> Iterator[tuple[int, str]]:
    """Yield round times from 0 to `width`, in nanoseconds, with their text."""
    step = next(
        step for power in range(20) for step in (10**power, 2 * 10**power, 5 * 10**power) if step * _MOST_TICKS >= width
    )
    size, unit = next(
        (size, unit) for size, unit in ((10**9, "s"), (10**6, "ms"), (1000, "µs"), (1, "ns")) if step >= size
    )
    for at in range(0, width + 1, step):
        yield at, f"{at // size} {unit}"


def steps(timeline: Timeline) -> list[Interval]:
    """Return the steps, each from the first rank's begin to the last rank's end.

    Where none are recorded, one lasts from a rank's begin of its most frequent collective to its next begin of that.
    """
    recorded = [rank.of("step") for rank in timeline.ranks]
    if any(recorded):
        together = zip(*filter(None, recorded), strict=False)
        return [(min(span.begin for span in spans), max(span.end for span in spans)) for spans in together]
    spans = timeline.ranks[0].of("communication")
    if not spans:
        return []
    most, _ = Counter(_kind(span) for span in spans).most_common(1)[0]
    begins = [span.begin for span in spans if _kind(span) == most]
    return list(zip(begins, begins[1:], strict=False))


def _windows(timeline: Timeline) -> Iterator[tuple[str, Interval]]:
    yield "The whole recording", (0, timeline.end)
    numbered = sorted(enumerate(steps(timeline), 1), key=lambda step: step[1][1] - step[1][0])
    if len(numbered) > 2:
        for name, (number, (begin, end)) in (
            ("A usual step (the median)", numbered[len(numbered) // 2]),
            ("The longest step", numbered[-1]),
        ):
            yield f"{name}: number {number}, at {timeline_text.time(begin)}", (begin, end)


def _picture(analysis: Analysis, title: str, window: Interval) -> Picture:
    begin, end = window
    ranks = analysis.ranks
    least = (end - begin) * len(ranks) * len(_ROWS) // _MOST_BARS
    height_of_rank = len(_ROWS) * (_ROW + _GAP) + _RANK_GAP
    bars: list[Bar] = []
    marks: list[Bar] = []
    rows = []
    for place, report in enumerate(ranks):
        for line, category in enumerate(_ROWS):
            y = place * height_of_rank + line * (_ROW + _GAP) + _RANK_GAP // 2
            rows.append((y, f"rank {report.rank.number}" if line == 0 else "", category))
            bars += _bars(report, category, window, y, least)
        marks += (_placed(mark, window, y - _ROW - _GAP) for mark in _marks(report, window))
    return Picture(
        title=title,
        begin=begin,
        end=end,
        height=height_of_rank * len(ranks),
        rows=tuple(rows),
        bars=tuple(bars),
        marks=tuple(marks),
        ticks=tuple((at * UNITS / (end - begin or 1), text) for at, text in ticks(end - begin)),
    )


def _bars(report: RankReport, category: str, window: Interval, y: int, least: int) -> Iterator[Bar]:
    """Yield the bars of a row; the exposed parts of communication lie on it."""
    spans = [span for span in report.rank.of(category) if span.begin < window[1] and span.end > window[0]]
    for span in _coalesced(spans, least):
        parts = clip(report.exposed, span.begin, span.end) if category == "communication" else ()
        exposed = f"\n{timeline_text.time(length(parts))} of it exposed" if parts else ""
        yield _placed(span, window, y, exposed)
        yield from (_placed(Span("exposed", "", *part), window, y) for part in clip(parts, *window))


def _marks(report: RankReport, window: Interval) -> Iterator[Span]:
    """Yield the instants in a close-up; in the whole recording they would cover everything."""
    instants = [mark for mark in report.rank.instants if window[0] <= mark.begin < window[1]]
    return iter(instants if len(instants) <= UNITS // 100 else ())


def _coalesced(spans: Iterable[Span], least: int) -> Iterator[Span]:
    """Join neighbours that are too short to be seen, as far as `least` nanoseconds."""
    run: list[Span] = []
    for span in spans:
        if run and span.end - run[0].begin >= least:
            yield _joined(run)
            run = []
        run.append(span)
    if run:
        yield _joined(run)


def _joined(run: Sequence[Span]) -> Span:
    if len(run) == 1:
        return run[0]
    longest, end = max(run, key=lambda span: span.duration), max(span.end for span in run)
    return replace(longest, begin=run[0].begin, end=end, args={"bytes": sum(s.bytes for s in run), "spans": len(run)})


def _placed(span: Span, window: Interval, y: int, remark: str = "") -> Bar:
    scale = UNITS / (window[1] - window[0])
    begin, end = max(span.begin, window[0]), min(span.end, window[1])
    width = (end - begin) * scale
    return Bar(
        kind=_class(span),
        x=round((begin - window[0]) * scale, 2),
        width=round(width, 2),
        y=y,
        title=f"{timeline_text.describe(span)}{remark}\nat {timeline_text.time(span.begin)}",
        label=_label(span, width),
    )


def _label(span: Span, width: float) -> str:
    bucket = str(span.args.get("bucket", ""))
    full = f"{span.name} {bucket}".strip()
    if width >= len(full) * _LETTER:
        return full
    return bucket if width >= len(bucket) * _LETTER else ""


def _class(span: Span) -> str:
    return (
        span.name if span.category == "compute" and span.name in ("forward", "backward", "optimizer") else span.category
    )


def _kinds(timeline: Timeline) -> list[str]:
    """Return what the legend shows: the kinds of bars that there are."""
    there = {_class(span) for rank in timeline.ranks for span in rank.spans}
    return [kind for kind in ("forward", "backward", "optimizer", "compute", "communication", "wait") if kind in there]


def _kind(span: Span) -> tuple[object, ...]:
    return span.name, span.args.get("bucket"), span.args.get("group")
