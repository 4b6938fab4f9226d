"""Which of the waiting turns a stage grants next.

A stage alternates between forwards and backwards, as one-forward-one-backward (1F1B) pipelines do. But it takes work
that is ready, rather than wait for the next one in a fixed order. A microbatch may begin at stage s while fewer than
`active_microbatches` - s earlier ones are unfinished there, because later stages need fewer in flight. The loss is
computed on the first stage, which needs one more in flight than classical 1F1B.
Work that resumes after a remote call comes first, because other stages wait for its result.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class TurnKind(enum.Enum):
    """The kinds of work that a thread computes in a turn."""

    RESUME = "resume"  # a forward, after a remote call
    INTERRUPTED = "interrupted"  # a forward that made way for a RESUME
    FORWARD = "forward"
    BACKWARD = "backward"


_MOST_URGENT = (TurnKind.RESUME, TurnKind.INTERRUPTED)


@dataclass(frozen=True)
class Turn:
    """The right to compute for one microbatch on a stage."""

    kind: TurnKind
    microbatch: int


class Schedule:
    """Decides the order of turns on one stage, for one step.

    Args:
        window: A microbatch may begin here while fewer than this many earlier ones are unfinished. At least 1 is used.
        in_order: Whether backwards run in the order of the microbatches, so that gradients add up to the same sums in
            every run.
    """

    def __init__(self, window: int, in_order: bool = False) -> None:
        self._window, self._in_order = max(1, window), in_order
        self._last = TurnKind.BACKWARD
        self._begun: set[int] = set()
        self._finished: set[int] = set()

    def choose(self, waiting: Sequence[Turn]) -> int | None:
        """Chooses the next turn and notes that it has begun.

        Args:
            waiting: The turns that threads ask for.

        Returns:
            An index into `waiting`, or None if none of them may begin yet.
        """
        best = min(
            (index for index, turn in enumerate(waiting) if self._may_begin(turn)),
            key=lambda index: self._rank_turn(waiting[index]),
            default=None,
        )
        if best is not None:
            turn = waiting[best]
            self._begun.add(turn.microbatch)
            if turn.kind in (TurnKind.FORWARD, TurnKind.BACKWARD):
                self._last = turn.kind
        return best

    def finish(self, microbatch: int) -> None:
        """Notes that a microbatch needs no more turns at this stage."""
        self._finished.add(microbatch)

    def _may_begin(self, turn: Turn) -> bool:
        """Whether a turn may begin now: the window allows its microbatch.

        Ordered backwards wait for earlier microbatches.
        """
        if self._in_order and turn.kind is TurnKind.BACKWARD:
            return self._finished.issuperset(range(turn.microbatch))
        if turn.microbatch in self._begun:
            return True
        earlier = [m for m in self._begun - self._finished if m < turn.microbatch]
        return len(earlier) < self._window

    def _rank_turn(self, turn: Turn) -> tuple[int, int]:
        """Sorts resumed work first, then the kind that was not last, then the other; earlier microbatches first."""
        if turn.kind in _MOST_URGENT:
            return _MOST_URGENT.index(turn.kind), turn.microbatch
        return len(_MOST_URGENT) + (turn.kind is self._last), turn.microbatch
