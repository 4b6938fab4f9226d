"""What a timeline says: how much communication the computation hides, how fast it is, and who is late to it.

For each rank,

- *busy* is when its main thread computes: its `compute` spans, or, where there are none, the time from its first span
  to its last; either less its `wait` spans.
- *communication* is the time in any of its `communication` spans; those that run at the same time count once. It
  includes the time in which a rank that came early waits for the others.
- *exposed* is the communication at times that are not busy. It makes the training longer; the rest is free.
- *overlap* = 1 − exposed / communication.
- *idle* is the part of its steps in which it computes nothing, where both are recorded: the bubble of a pipeline.
- *bandwidth* is what its collectives were given, in bytes, over its communication time.

The n-th collective of an operation, bucket and group on one rank is the n-th on every other. It cannot end before its
last rank has begun: its *skew* is the time from the first rank's begin to the last's, which the others spend waiting.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from shoal.report.intervals import Intervals, difference, length, union
from shoal.report.trace import Rank, Span, Timeline

_ENDS_TOGETHER = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"}
_SLOWEST = 10


@dataclass(frozen=True)
class RankReport:
    """One rank's part. Times are in nanoseconds."""

    rank: Rank
    communication: Intervals
    exposed: Intervals
    waiting: int
    bytes: int
    steps: int
    step_time: int | None
    """The median; None: no steps are recorded."""
    idle: float | None
    """The part of its steps in which it computes nothing, 0 to 1; None: steps or computation are not recorded."""
    slowest: Span | None
    last_to: int
    """The collectives to which it came last."""
    lateness: int
    """From the first rank's begin of a collective to this one's; the mean."""

    @property
    def overlap(self) -> float | None:
        """The part of its communication that is hidden, 0 to 1; None: there is none."""
        total = length(self.communication)
        return 1 - length(self.exposed) / total if total else None

    @property
    def bandwidth(self) -> float | None:
        """In GB/s (10⁹ bytes a second); None: no bytes are recorded."""
        total = length(self.communication)
        return self.bytes / total if total and self.bytes else None


@dataclass(frozen=True)
class Collective:
    """One collective: its span on every rank that recorded it."""

    operation: str
    spans: Mapping[int, Span]

    @property
    def last(self) -> int:
        """The rank that begins last."""
        return max(self.spans, key=lambda rank: self.spans[rank].begin)

    @property
    def first_begin(self) -> int:
        """When the first rank begins."""
        return min(span.begin for span in self.spans.values())

    @property
    def skew(self) -> int:
        """From the first rank's begin to the last's, in nanoseconds."""
        return self.spans[self.last].begin - self.first_begin

    @property
    def early_end(self) -> int:
        """How long before its last rank begins one has ended, in nanoseconds: only clocks that differ show that."""
        end = min(span.end for span in self.spans.values())
        return max(0, self.spans[self.last].begin - end) if self.operation in _ENDS_TOGETHER else 0


@dataclass(frozen=True)
class Analysis:
    """What is worth knowing about a timeline."""

    timeline: Timeline
    ranks: tuple[RankReport, ...]
    collectives: tuple[Collective, ...]

    @cached_property
    def skew(self) -> int:
        """The time that ranks waited for the last one, over all collectives, in nanoseconds."""
        return sum(collective.skew for collective in self.collectives)

    @cached_property
    def shares(self) -> Mapping[int, float]:
        """For each rank, the part of `skew` in collectives to which it came last."""
        caused: Counter[int] = Counter()
        for collective in self.collectives:
            caused[collective.last] += collective.skew
        return {report.rank.number: caused[report.rank.number] / (self.skew or 1) for report in self.ranks}

    @property
    def straggler(self) -> int | None:
        """The rank that most of the waiting is for: more than halfway from an even share to all of it."""
        if not self.skew:
            return None
        rank = max(self.shares, key=lambda number: self.shares[number])
        return rank if self.shares[rank] > (1 + 1 / len(self.ranks)) / 2 else None

    @property
    def slowest(self) -> tuple[tuple[int, Span], ...]:
        """The longest communication spans with their ranks, the longest first."""
        spans = [(report.rank.number, span) for report in self.ranks for span in report.rank.of("communication")]
        return tuple(sorted(spans, key=lambda found: -found[1].duration)[:_SLOWEST])


def analyse(timeline: Timeline) -> Analysis:
    """Analyse a timeline, as the top of this module defines it."""
    found = tuple(collectives(timeline.ranks))
    return Analysis(timeline, tuple(_report(rank, found) for rank in timeline.ranks), found)


def busy(rank: Rank) -> Intervals:
    """Return when the main thread of a rank computes."""
    recorded = ((rank.spans[0].begin, max(span.end for span in rank.spans)),)
    return difference(_times(rank.of("compute")) or recorded, _times(rank.of("wait")))


def collectives(ranks: Sequence[Rank]) -> Iterator[Collective]:
    """Yield the collectives that at least two ranks recorded, in the order of the first rank that has them."""
    found: dict[tuple[object, ...], dict[int, Span]] = defaultdict(dict)
    for rank in ranks:
        seen: Counter[tuple[object, ...]] = Counter()
        for span in rank.of("communication"):
            kind = (span.args.get("operation", span.name), span.args.get("bucket"), span.args.get("group"))
            found[(*kind, seen[kind])][rank.number] = span
            seen[kind] += 1
    for key, spans in found.items():
        if len(spans) > 1:
            yield Collective(str(key[0]), spans)


def notes(analysis: Analysis) -> Iterator[str]:
    """Yield what a reader must know before believing the figures."""
    timeline = analysis.timeline
    if timeline.missing:
        yield f"No file of rank {_numbers(timeline.missing)}: the skew is among the other ranks only."
    cut = tuple(rank.number for rank in timeline.ranks if not rank.complete)
    if cut:
        yield f"The file of rank {_numbers(cut)} has no end: its process was killed, or still runs."
    early = max((collective.early_end for collective in analysis.collectives), default=0)
    hosts = {rank.host for rank in timeline.ranks}
    if early:
        yield f"The hosts' clocks differ by {early / 1e6:.3f} ms or more: do not trust skews of that size."
    elif len(hosts) > 1 and not any(rank.clock_offset for rank in timeline.ranks):
        yield "The ranks ran on several hosts whose clocks were not compared: do not trust skews of milliseconds."


def _report(rank: Rank, found: Sequence[Collective]) -> RankReport:
    spans = rank.of("communication")
    communication = _times(spans)
    steps = sorted(span.duration for span in rank.of("step"))
    within, computing = _times(rank.of("step")), _times(rank.of("compute"))
    mine = [collective for collective in found if rank.number in collective.spans]
    late = sum(collective.spans[rank.number].begin - collective.first_begin for collective in mine)
    return RankReport(
        rank=rank,
        communication=communication,
        exposed=difference(communication, busy(rank)),
        waiting=length(_times(rank.of("wait"))),
        bytes=sum(span.bytes for span in spans),
        steps=len(steps),
        step_time=steps[len(steps) // 2] if steps else None,
        idle=length(difference(within, computing)) / length(within) if within and computing else None,
        slowest=max(spans, key=lambda span: span.duration, default=None),
        last_to=sum(collective.last == rank.number for collective in mine),
        lateness=late // len(mine) if mine else 0,
    )


def _times(spans: Sequence[Span]) -> Intervals:
    return union((span.begin, span.end) for span in spans)


def _numbers(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
