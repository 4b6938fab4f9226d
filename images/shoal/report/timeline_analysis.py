"""Analyses a timeline: how much communication is hidden by computation, its bandwidth, and which rank is late.

Definitions, per rank:

- *busy*: the times at which its main thread computes: its `compute` spans without its `wait` spans. If it has no
  `compute` spans, all the time from its first span to its last without its `wait` spans.
- *communication*: the time in `communication` spans. Spans that overlap count once. The time in which an early rank
  waits for the others is included.
- *exposed*: communication while the rank is not busy. It makes training longer; the rest costs nothing.
- *overlap* = 1 − exposed / communication.
- *shares*: how its steps are spent, if steps and computation are recorded: busy, exposed communication, and *idle*,
  which is the rest. Together they are 1. In a pipeline, idle is the bubble.
- *bandwidth*: the bytes passed to its collectives, divided by its communication time.

Times are tuples of disjoint half-open intervals in ascending order, as `union` returns them.

The n-th collective of an operation, bucket and group on one rank matches the n-th on every other rank. It cannot end
before its last rank has begun. Its *skew* is the time from the first rank's begin to the last rank's begin, in which
the other ranks wait.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from shoal.report.trace import Rank, Span, Timeline

Interval = tuple[int, int]
Intervals = tuple[Interval, ...]


def union(intervals: Iterable[Interval]) -> Intervals:
    """Returns the times that are in any of the intervals, which may overlap and be in any order.

    Intervals that touch become one. Empty ones are left out.
    """
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return tuple(merged)


def intersection(ones: Intervals, others: Intervals) -> Intervals:
    """Returns the times that are in both."""
    common: list[Interval] = []
    one = other = 0
    while one < len(ones) and other < len(others):
        begin, end = max(ones[one][0], others[other][0]), min(ones[one][1], others[other][1])
        if begin < end:
            common.append((begin, end))
        if ones[one][1] < others[other][1]:
            one += 1
        else:
            other += 1
    return tuple(common)


def difference(ones: Intervals, others: Intervals) -> Intervals:
    """Returns the times in `ones` that are not in `others`."""
    if not ones:
        return ()
    begin, end = ones[0][0], ones[-1][1]
    edges = [begin, *(edge for interval in others for edge in interval), end]
    return intersection(ones, union(zip(edges[::2], edges[1::2], strict=True)))


def clip(intervals: Intervals, begin: int, end: int) -> Intervals:
    """Returns the times from `begin` to `end`. Fast if that is a small part."""
    first = bisect_right(intervals, begin, key=lambda interval: interval[1])
    last = bisect_left(intervals, end, key=lambda interval: interval[0])
    return intersection(intervals[first:last], ((begin, end),))


def length(intervals: Intervals) -> int:
    """Returns the sum of the lengths."""
    return sum(end - begin for begin, end in intervals)


_SYNCHRONIZING = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"}
_SLOWEST = 10


@dataclass(frozen=True)
class StepShares:
    """How the time of steps is spent, as fractions that add up to 1."""

    computing: float
    exposed: float
    """Communication that no computation hides."""
    idle: float
    """Neither: the rank waits for data, for other stages of a pipeline, or for the script."""


@dataclass(frozen=True)
class RankReport:
    """The figures of one rank. Times are in nanoseconds."""

    rank: Rank
    communication: Intervals
    exposed: Intervals
    waiting: int
    bytes: int
    steps: int
    step_time: int | None
    """The median; None: no steps were recorded."""
    shares: StepShares | None
    """None: steps or computation were not recorded."""
    slowest: Span | None
    last_to: int
    """The number of collectives that it was last to begin."""
    lateness: int
    """The mean time from the first rank's begin of a collective to this rank's begin."""

    @property
    def overlap(self) -> float | None:
        """The fraction of its communication that is hidden, 0 to 1; None: it has none."""
        total = length(self.communication)
        return 1 - length(self.exposed) / total if total else None

    @property
    def bandwidth(self) -> float | None:
        """Bytes divided by the time of communication, in GB/s (10⁹ bytes per second); None: one of them is 0."""
        total = length(self.communication)
        return self.bytes / total if total and self.bytes else None


@dataclass(frozen=True)
class Collective:
    """One collective, with its span on every rank that recorded it."""

    operation: str
    spans: Mapping[int, Span]

    @cached_property
    def last(self) -> int:
        """The rank that begins last."""
        return max(self.spans, key=lambda rank: self.spans[rank].begin)

    @cached_property
    def first_begin(self) -> int:
        """When the first rank begins."""
        return min(span.begin for span in self.spans.values())

    @property
    def skew(self) -> int:
        """From the first rank's begin to the last's, in nanoseconds."""
        return self.spans[self.last].begin - self.first_begin

    @property
    def early_end(self) -> int:
        """How long one rank ended before the last began, in nanoseconds. If not 0, the hosts' clocks differ.

        Always 0 for operations in which ranks do not wait for all others.
        """
        end = min(span.end for span in self.spans.values())
        return max(0, self.spans[self.last].begin - end) if self.operation in _SYNCHRONIZING else 0


@dataclass(frozen=True)
class Analysis:
    """A timeline with the figures of its ranks and its collectives."""

    timeline: Timeline
    ranks: tuple[RankReport, ...]
    collectives: tuple[Collective, ...]

    @cached_property
    def skew(self) -> int:
        """The sum of the skews of all collectives, in nanoseconds."""
        return sum(collective.skew for collective in self.collectives)

    @cached_property
    def shares(self) -> Mapping[int, float]:
        """For each rank, the fraction of `skew` in collectives that it was last to begin."""
        caused: Counter[int] = Counter()
        for collective in self.collectives:
            caused[collective.last] += collective.skew
        return {report.rank.number: caused[report.rank.number] / (self.skew or 1) for report in self.ranks}

    @property
    def straggler(self) -> int | None:
        """The rank that causes most of the waiting, over halfway from an even share to 1. None if there is none."""
        if not self.skew:
            return None
        rank = max(self.shares, key=lambda number: self.shares[number])
        return rank if self.shares[rank] > (1 + 1 / len(self.ranks)) / 2 else None

    @property
    def slowest(self) -> tuple[tuple[int, Span], ...]:
        """The ten longest communication spans, each with its rank, longest first."""
        spans = [(report.rank.number, span) for report in self.ranks for span in report.rank.spans_of("communication")]
        return tuple(sorted(spans, key=lambda found: -found[1].duration)[:_SLOWEST])


def analyse(timeline: Timeline) -> Analysis:
    """Analyses a timeline. This module's docstring defines the figures."""
    found = tuple(match_collectives(timeline.ranks))
    return Analysis(timeline, tuple(_analyse_rank(rank, found) for rank in timeline.ranks), found)


def find_busy_times(rank: Rank) -> Intervals:
    """Returns the times at which the main thread of a rank computes: its `compute` spans without its `wait` spans.

    If it has no `compute` spans, the time from its first span to its last takes their place.
    """
    recorded = ((rank.spans[0].begin, max(span.end for span in rank.spans)),)
    return difference(_merge_times(rank.spans_of("compute")) or recorded, _merge_times(rank.spans_of("wait")))


def match_collectives(ranks: Sequence[Rank]) -> Iterator[Collective]:
    """Yields the collectives that two or more ranks recorded, in the order of the first rank that recorded them.

    Spans match by operation, bucket, group and their place among equal ones.
    """
    found: dict[tuple[object, ...], dict[int, Span]] = defaultdict(dict)
    for rank in ranks:
        seen: Counter[tuple[object, ...]] = Counter()
        for span in rank.spans_of("communication"):
            kind = (span.args.get("operation", span.name), span.args.get("bucket"), span.args.get("group"))
            found[(*kind, seen[kind])][rank.number] = span
            seen[kind] += 1
    for key, spans in found.items():
        if len(spans) > 1:
            yield Collective(str(key[0]), spans)


def list_caveats(analysis: Analysis) -> Iterator[str]:
    """Yields sentences about missing data and differing clocks, which make figures less reliable; maybe none."""
    timeline = analysis.timeline
    if timeline.missing:
        yield f"Timelines are missing (rank {_join_numbers(timeline.missing)}): the skew covers the other ranks only."
    cut = tuple(rank.number for rank in timeline.ranks if not rank.complete)
    if cut:
        yield f"Incomplete timelines (rank {_join_numbers(cut)}): the process was killed, or is still running."
    early = max((collective.early_end for collective in analysis.collectives), default=0)
    hosts = {rank.host for rank in timeline.ranks}
    if early:
        yield f"The clocks of the hosts differ by at least {early / 1e6:.3f} ms: skews of that size are not reliable."
    elif len(hosts) > 1 and not any(rank.clock_offset for rank in timeline.ranks):
        yield "The clocks of the hosts were not compared: skews of milliseconds are not reliable."


def _analyse_rank(rank: Rank, found: Sequence[Collective]) -> RankReport:
    spans = rank.spans_of("communication")
    communication = _merge_times(spans)
    steps = sorted(span.duration for span in rank.spans_of("step"))
    exposed = difference(communication, find_busy_times(rank))
    mine = [collective for collective in found if rank.number in collective.spans]
    late = sum(collective.spans[rank.number].begin - collective.first_begin for collective in mine)
    return RankReport(
        rank=rank,
        communication=communication,
        exposed=exposed,
        waiting=length(_merge_times(rank.spans_of("wait"))),
        bytes=sum(span.bytes for span in spans),
        steps=len(steps),
        step_time=steps[len(steps) // 2] if steps else None,
        shares=_share_steps(rank, exposed),
        slowest=max(spans, key=lambda span: span.duration, default=None),
        last_to=sum(collective.last == rank.number for collective in mine),
        lateness=late // len(mine) if mine else 0,
    )


def _share_steps(rank: Rank, exposed: Intervals) -> StepShares | None:
    """Returns how the steps of a rank are spent; None if steps or computation were not recorded."""
    within = _merge_times(rank.spans_of("step"))
    if not within or not rank.spans_of("compute"):
        return None
    computing = length(intersection(within, find_busy_times(rank))) / length(within)
    communicating = length(intersection(within, exposed)) / length(within)
    return StepShares(computing, communicating, 1 - computing - communicating)


def _merge_times(spans: Sequence[Span]) -> Intervals:
    return union((span.begin, span.end) for span in spans)


def _join_numbers(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
