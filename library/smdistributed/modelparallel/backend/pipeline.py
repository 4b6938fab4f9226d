"""The order in which the stages of a static graph send and receive, for the microbatches of one step.

A stage that runs work as it becomes ready decides in the step (see `schedule`). A graph needs its order before. Here a
step is simulated with the same rule: all forwards take the same time, and backwards twice as long. Sending never waits,
so that any simulated order can be executed without a deadlock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from smdistributed.modelparallel.backend.exceptions import SMPRuntimeError
from smdistributed.modelparallel.backend.schedule import Schedule, Turn, TurnKind

_SECONDS = {TurnKind.FORWARD: 1.0, TurnKind.RESUME: 0.1, TurnKind.BACKWARD: 2.0}
_LATENCY = 0.01


class StageEvent(NamedTuple):
    """An action of a stage for one microbatch.

    `kind`: "send", "receive", or "begin" of a forward or backward that needs no message. `label`: the same on both
    ends.
    """

    microbatch: int
    is_backward: bool
    kind: str
    label: str


class _Work(NamedTuple):
    """Consecutive events of one microbatch, of which only the first may wait for a message."""

    turn: Turn
    events: list[tuple[int, StageEvent]]

    @property
    def waits_for(self) -> str | None:
        return next((event.label for _, event in self.events if event.kind == "receive"), None)


def order(programs: Sequence[Sequence[StageEvent]], active: int, simple: bool) -> list[list[int]]:
    """Returns, for each stage, the places of its events in its program, in the order to execute.

    `active`: how many microbatches may be in flight at the first stage; one less at each later one. `simple`: all
    forwards come before the first backward. Raises SMPRuntimeError if stages would wait forever, for each other or for
    a message that no stage sends.
    """
    stages = [_SimulatedStage(program, max(1, active - index), simple) for index, program in enumerate(programs)]
    arrivals: dict[str, float] = {}
    now = 0.0
    while any(stage.is_busy for stage in stages):
        for stage in stages:
            stage.advance(now, arrivals)
        later = [stage.free_at for stage in stages if stage.free_at > now] + [t for t in arrivals.values() if t > now]
        if not later and any(stage.is_busy for stage in stages):
            waits = "; ".join(f"stage {number}: {stage.state}" for number, stage in enumerate(stages) if stage.is_busy)
            raise SMPRuntimeError(f"The stages would wait for each other forever ({waits}).")
        now = min(later, default=now)
    return [stage.done for stage in stages]


class _SimulatedStage:
    """Simulates one stage. `done`: the places of its events, in the order in which they were executed."""

    def __init__(self, program: Sequence[StageEvent], window: int, simple: bool) -> None:
        microbatches = sorted({event.microbatch for event in program})
        self._rest = {m: list(_work(program, m)) for m in microbatches}
        forwards = [work for rest in self._rest.values() for work in rest if work.turn.kind is not TurnKind.BACKWARD]
        has_backwards = sum(map(len, self._rest.values())) > len(forwards)
        self._forwards = len(forwards)
        self._simple = simple and has_backwards
        self._schedule = Schedule(len(microbatches) if self._simple or not has_backwards else window)
        self.free_at = 0.0
        self.done: list[int] = []

    @property
    def is_busy(self) -> bool:
        return any(self._rest.values())

    @property
    def state(self) -> str:
        """The next work of each microbatch, for an error."""
        return ", ".join(f"{rest[0].turn}: {rest[0].waits_for}" for rest in self._rest.values() if rest)

    def advance(self, now: float, arrivals: dict[str, float]) -> None:
        """Simulates the next work, if some is ready. Notes in `arrivals` when its messages arrive, by label."""
        if self.free_at > now:
            return
        ready = [rest[0] for rest in self._rest.values() if rest and self._is_ready(rest[0], now, arrivals)]
        choice = self._schedule.choose([work.turn for work in ready])
        if choice is None:
            return
        work = ready[choice]
        self._rest[work.turn.microbatch].pop(0)
        self._forwards -= work.turn.kind is not TurnKind.BACKWARD
        self.free_at = now + _SECONDS[work.turn.kind]
        for place, event in work.events:
            self.done.append(place)
            if event.kind == "send":
                arrivals[event.label] = self.free_at + _LATENCY
        if not self._rest[work.turn.microbatch]:
            self._schedule.finish(work.turn.microbatch)

    def _is_ready(self, work: _Work, now: float, arrivals: dict[str, float]) -> bool:
        """Whether a work's message has arrived. In the simple pipeline, a backward also waits for all forwards."""
        if self._simple and work.turn.kind is TurnKind.BACKWARD and self._forwards:
            return False
        return work.waits_for is None or arrivals.get(work.waits_for, now + 1) <= now


def _work(program: Sequence[StageEvent], microbatch: int) -> Iterator[_Work]:
    """Yields the work of one microbatch on a stage, in its order: events between two points at which it waits."""
    events: list[tuple[int, StageEvent]] = []
    has_begun = False

    def work() -> _Work:
        backward = events[0][1].is_backward
        kind = TurnKind.BACKWARD if backward else TurnKind.RESUME if has_begun else TurnKind.FORWARD
        return _Work(Turn(kind, microbatch), events)

    for place, event in enumerate(program):
        if event.microbatch != microbatch:
            continue
        alone = len(events) == 1 and events[0][1].kind == "begin" and events[0][1].is_backward == event.is_backward
        if events and (event.kind == "begin" or (event.kind == "receive" and not alone)):
            yield work()
            has_begun, events = True, []
        events.append((place, event))
    if events:
        yield work()
