"""Which of the pieces of work that wait at a stage comes next.

A stage alternates between forwards and backwards as one-forward-one-backward pipelines do, but takes what is there
rather than wait for what is next in a fixed order. A microbatch may begin at stage s while fewer than
`active_microbatches` - s earlier ones are unfinished there: later stages need fewer in flight, and the loss is computed
on the first stage, which costs one more than the classical order has.
Work that goes on after a remote call comes first: other stages wait for what it will send.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class Kind(enum.Enum):
    """What a piece of work is."""

    GO_ON = "go on"  # with a forward, after a remote call
    INTERRUPTED = "interrupted"  # gave way to the former
    FORWARD = "forward"
    BACKWARD = "backward"


_FIRST = (Kind.GO_ON, Kind.INTERRUPTED)


@dataclass(frozen=True)
class Turn:
    """A piece of work of one microbatch."""

    kind: Kind
    microbatch: int


class Schedule:
    """The rule of one stage, for one step.

    window: how many earlier microbatches may be unfinished here when one begins.
    in_order: backwards are in the order of the microbatches, so that sums of gradients are the same in every run.
    """

    def __init__(self, window: int, in_order: bool = False) -> None:
        self._window, self._in_order = max(1, window), in_order
        self._last = Kind.BACKWARD
        self._begun: set[int] = set()
        self._finished: set[int] = set()

    def choose(self, waiting: Sequence[Turn]) -> int | None:
        """The index of the piece of work to do now; None: none of them yet."""
        best = min(
            (index for index, turn in enumerate(waiting) if self._may_begin(turn)),
            key=lambda index: self._urgency(waiting[index]),
            default=None,
        )
        if best is not None:
            turn = waiting[best]
            self._begun.add(turn.microbatch)
            if turn.kind in (Kind.FORWARD, Kind.BACKWARD):
                self._last = turn.kind
        return best

    def finish(self, microbatch: int) -> None:
        """Say that a microbatch needs nothing more at this stage."""
        self._finished.add(microbatch)

    def _may_begin(self, turn: Turn) -> bool:
        if self._in_order and turn.kind is Kind.BACKWARD:
            return self._finished.issuperset(range(turn.microbatch))
        if turn.microbatch in self._begun:
            return True
        earlier = [m for m in self._begun - self._finished if m < turn.microbatch]
        return len(earlier) < self._window

    def _urgency(self, turn: Turn) -> tuple[int, int]:
        """Going on, then what was not done last, then the other; earlier microbatches first."""
        if turn.kind in _FIRST:
            return _FIRST.index(turn.kind), turn.microbatch
        return len(_FIRST) + (turn.kind is self._last), turn.microbatch
