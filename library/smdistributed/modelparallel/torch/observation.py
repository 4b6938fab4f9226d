"""What a stage does and waits for: recorded for the timeline, said when it lasts long, ended when it lasts too long.

`SMDDP_STALL_SECONDS` (60 if it is not set) is how long a stage waits before it says for what. A stage that computes
nothing, and hears of no other for `SMP_TIMEOUT_SECONDS`, fails. One that computes for long lets the others hear of it
now and then.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable

from smdistributed.core import timeline
from smdistributed.core.diagnostics import StallDetector
from smdistributed.modelparallel.torch.work import Work

_STACK_CALLS = 8
_LOOKS = 4
_NOT_CALLED = "nobody has called anything here: the first stage may not be in this step"


class Observer:
    """Of one stage. Makes a thread at the first step.

    who: how the stage calls itself. seconds: how long it waits for the others. on_overdue: called with what it has
    waited for so long. on_long_turn: called now and then while this stage computes for long.
    """

    def __init__(
        self, who: str, seconds: float, on_overdue: Callable[[str], None], on_long_turn: Callable[[], None]
    ) -> None:
        self._who, self._seconds = who, seconds
        self._on_overdue, self._on_long_turn = on_overdue, on_long_turn
        self._heard = 0.0  # when something has last happened here
        self._turn: tuple[Work, int, float] | None = None
        self._began = self._began_ns = 0
        self._waits: dict[int, tuple[Callable[[], str], float]] = {}
        self._told: set[int] = set()
        self._stall = StallDetector().seconds
        self._step = 0
        self._step_began = 0.0
        self._thread: threading.Thread | None = None

    def step_begins(self, number: int) -> None:
        """The script's thread enters a step."""
        self._waits.clear()
        self._told.clear()
        self._step, self._step_began, self._began_ns = number, time.monotonic(), timeline.now()
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="smp-watch", daemon=True)
            self._thread.start()

    def step_ends(self) -> None:
        """The script's thread leaves the step."""
        if timeline.recorder is not None and self._step:
            timeline.recorder.complete("step", f"step {self._step}", self._began_ns, timeline.now(), None)
        self._step = 0

    def turn_begins(self, work: Work) -> None:
        """This thread computes now, for this work."""
        self._turn = work, threading.get_ident(), time.monotonic()
        self._began = timeline.now() if timeline.recorder is not None else 0

    def turn_ends(self, work: Work) -> None:
        """It does so no more."""
        self._turn, self._heard = None, time.monotonic()
        if timeline.recorder is not None and self._began:
            name = "backward" if work.is_backward else "forward"
            args = {"microbatch": work.microbatch}
            timeline.recorder.complete("compute", name, self._began, timeline.now(), args)

    def hears(self) -> None:
        """Another stage has sent something."""
        self._heard = time.monotonic()

    def waits(self, call: int, what: Callable[[], str]) -> None:
        """A call is under way. what: how a person names it; asked only if it lasts."""
        self._waits[call] = what, time.monotonic()

    def waits_no_more(self, call: int) -> None:
        """Its answer is there."""
        self._waits.pop(call, None)

    def _watch(self) -> None:
        while True:
            time.sleep(min(self._stall, self._seconds) / _LOOKS)
            if self._step:
                self._look(time.monotonic())
                self._keep_limit(time.monotonic())

    def _keep_limit(self, now: float) -> None:
        turn = self._turn
        if turn and now - turn[2] > self._seconds / _LOOKS:
            self._on_long_turn()
        elif not turn and now - max(self._heard, self._step_began) > self._seconds:
            self._on_overdue("; ".join(what() for what, _ in list(self._waits.values())) or _NOT_CALLED)

    def _look(self, now: float) -> None:
        """Say what has lasted longer than the limit, once."""
        turn, waits = self._turn, list(self._waits.items())
        late = [what() for call, (what, since) in waits if now - since > self._stall and call not in self._told]
        self._told.update(call for call, (_, since) in waits if now - since > self._stall)
        if turn and now - turn[2] > self._stall and id(turn[0]) not in self._told:
            self._told.add(id(turn[0]))
            late.append(f"it computes microbatch {turn[0].microbatch}, at:\n{_stack(turn[1])}")
        idle = not turn and not waits and now - self._step_began > self._stall and -1 not in self._told
        if idle:
            self._told.add(-1)
            late.append(_NOT_CALLED)
        for what in late:
            print(f"smp: {self._who}, step {self._step}, for {self._stall:g} s: {what}", file=sys.stderr, flush=True)


def _stack(thread: int) -> str:
    frame = sys._current_frames().get(thread)
    return "".join(traceback.format_stack(frame)[-_STACK_CALLS:]).rstrip() if frame else "  (it has ended)"
