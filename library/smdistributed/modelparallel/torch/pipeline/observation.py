"""Watches what a stage computes and waits for: it records a timeline, warns of stalls, and enforces the time limit.

After `SMDDP_STALL_SECONDS` (default: 60) a stage prints what it waits for. A stage that computes nothing and receives
nothing from the others for `SMP_TIMEOUT_SECONDS` fails. One that computes for long tells the others that it is alive.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable

from smdistributed.core import timeline
from smdistributed.core.diagnostics import StallDetector
from smdistributed.modelparallel.torch.pipeline.tasks import StageTask

_STACK_CALLS = 8
_CHECKS = 4  # within each limit
_NOT_CALLED = "nobody has called anything here: the first stage may not be in this step"


class StageObserver:
    """Watches one stage. It starts a thread at the first step, on which both functions are called.

    `on_timeout` gets a text about what the stage waits for, after `seconds` without a message from another stage.
    `on_long_turn` is called repeatedly, while the stage computes for long.
    """

    def __init__(
        self, name: str, seconds: float, on_timeout: Callable[[str], None], on_long_turn: Callable[[], None]
    ) -> None:
        self._name, self._seconds = name, seconds
        self._on_timeout, self._on_long_turn = on_timeout, on_long_turn
        self._last_event = 0.0
        self._turn: tuple[StageTask, int, float] | None = None
        self._began = self._began_ns = 0
        self._waits: dict[int, tuple[Callable[[], str], float]] = {}
        self._stalls = StallDetector()
        self._step = 0
        self._step_began = 0.0
        self._thread: threading.Thread | None = None

    def step_begins(self, number: int) -> None:
        """Notes that the script's thread enters a step; forgets calls and stalls. The first one starts `_watch`."""
        self._waits.clear()
        self._stalls.reset()
        self._step, self._step_began, self._began_ns = number, time.monotonic(), timeline.now()
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="smp-watch", daemon=True)
            self._thread.start()

    def step_ends(self) -> None:
        """Notes that the script's thread leaves the step, and records it in the timeline, if there is one."""
        if timeline.recorder is not None and self._step:
            timeline.recorder.complete("step", f"step {self._step}", self._began_ns, timeline.now(), None)
        self._step = 0

    def turn_begins(self, task: StageTask) -> None:
        self._turn = task, threading.get_ident(), time.monotonic()
        self._began = timeline.now() if timeline.recorder is not None else 0

    def turn_ends(self, task: StageTask) -> None:
        """Notes that the task does not compute any more, and records that in the timeline, if there is one."""
        self._turn, self._last_event = None, time.monotonic()
        if timeline.recorder is not None and self._began:
            name = "backward" if task.is_backward else "forward"
            args = {"microbatch": task.microbatch}
            timeline.recorder.complete("compute", name, self._began, timeline.now(), args)

    def message_received(self) -> None:
        self._last_event = time.monotonic()

    def call_begins(self, call: int, describe: Callable[[], str]) -> None:
        """Notes a call to another stage. `describe` returns a text about it, and is called only if it stalls."""
        self._waits[call] = describe, time.monotonic()

    def call_ends(self, call: int) -> None:
        self._waits.pop(call, None)

    def _watch(self) -> None:
        """Thread, never ends: during steps it prints stalls, and calls `on_long_turn` or, too late, `on_timeout`."""
        while True:
            time.sleep(min(self._stalls.seconds, self._seconds) / _CHECKS)
            if self._step:
                self._report_stalls(time.monotonic())
                self._check_limit(time.monotonic())

    def _check_limit(self, now: float) -> None:
        """A turn is long after the timeout divided by _CHECKS. The timeout counts from the last turn or message."""
        turn = self._turn
        if turn and now - turn[2] > self._seconds / _CHECKS:
            self._on_long_turn()
        elif not turn and now - max(self._last_event, self._step_began) > self._seconds:
            self._on_timeout("; ".join(describe() for describe, _ in list(self._waits.values())) or _NOT_CALLED)

    def _report_stalls(self, now: float) -> None:
        """Prints to stderr every call, turn and idle step that lasts longer than SMDDP_STALL_SECONDS, once."""
        turn, waits = self._turn, list(self._waits.items())
        late = [describe() for call, (describe, began) in waits if self._stalls.is_new_stall(call, now - began)]
        if turn and self._stalls.is_new_stall(turn[0], now - turn[2]):
            late.append(f"it computes microbatch {turn[0].microbatch}, at:\n{_stack(turn[1])}")
        if not turn and not waits and self._stalls.is_new_stall("idle", now - self._step_began):
            late.append(_NOT_CALLED)
        for text in late:
            since = f"for {self._stalls.seconds:g} s"
            print(f"smp: {self._name}, step {self._step}, {since}: {text}", file=sys.stderr, flush=True)


def _stack(thread: int) -> str:
    frame = sys._current_frames().get(thread)
    return "".join(traceback.format_stack(frame)[-_STACK_CALLS:]).rstrip() if frame else "  (it has ended)"
