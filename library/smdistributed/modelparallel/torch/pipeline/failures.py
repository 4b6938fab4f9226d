"""The other stages of a pipeline: how this one names them and sends to them, and how failures end all of them.

The first failure on any stage is sent to all stages, and raised in all their threads.

It also watches what a stage computes and waits for: it records a timeline, warns of stalls, and enforces the time
limit. After `SMDDP_STALL_SECONDS` (default: 60) a stage prints what it waits for. A stage that computes nothing and
receives nothing from the others for `SMP_TIMEOUT_SECONDS` fails. One that computes for long tells the others that it
is alive.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from smdistributed.core import timeline
from smdistributed.core.diagnostics import StallDetector
from smdistributed.core.handshake import HandshakeError
from smdistributed.modelparallel.backend.config import CONNECTION_LOST
from smdistributed.modelparallel.backend.exceptions import SMPRuntimeError
from smdistributed.modelparallel.backend.transport import Transport
from smdistributed.modelparallel.torch.pipeline.messages import MessageKind, send
from smdistributed.modelparallel.torch.pipeline.tasks import StageTask

_STACK_CALLS = 8
_CHECKS = 4  # within each limit
_NOT_CALLED = "nobody has called anything here: the first stage may not be in this step"


class Peers:
    """The stages of a pipeline, as one of them sees the others. `partners`: ranks of TP_GROUP, in other pipelines."""

    def __init__(self, transport: Transport, ranks: Sequence[int], rank: int, partners: Sequence[int] = ()) -> None:
        self._transport, self.ranks, self.partners = transport, tuple(ranks), tuple(partners)
        self.index = self.ranks.index(rank)
        """This rank's stage."""
        self.lost: set[int] = set()
        """The ranks with a connection that has ended."""

    def describe(self, rank: int) -> str:
        """Names a rank for people, as "Stage 1 (rank 3)"."""
        return f"Stage {self.ranks.index(rank)} (rank {rank})" if rank in self.ranks else f"Rank {rank}"

    def lost_error(self, rank: int) -> SMPRuntimeError:
        return SMPRuntimeError(f"{self.describe(rank)}: {CONNECTION_LOST}")

    def send(self, to: int, *args: Any, **kwargs: Any) -> None:
        """Sends a message to a rank: see `messages.send`. Raises OSError if its connection is lost."""
        send(self._transport, to, *args, **kwargs)

    def notify_all(self, kind: MessageKind, about: object = None) -> list[threading.Thread]:
        """Sends to all other stages and partners. Returns the threads: a full socket must not delay the others."""
        everyone = dict.fromkeys((*self.ranks, *self.partners))
        others = [rank for rank in everyone if rank != self.ranks[self.index] and rank not in self.lost]
        threads = [threading.Thread(target=self._notify, args=(rank, kind, about), daemon=True) for rank in others]
        for thread in threads:
            thread.start()
        return threads

    def _notify(self, rank: int, kind: MessageKind, about: object) -> None:
        """Thread of `notify_all`: sends the message to one stage. Errors are ignored: the stage is lost."""
        with suppress(OSError):  # lost as well
            self.send(rank, kind, -1, about=about)


_REASON_SECONDS = 1.0  # a stage that is lost has mostly sent the reason, which is still on its way
_REPORT_SECONDS = 5.0


class Failures:
    """The failure of this rank's pipeline, which is final. `on_failure` is called once, to wake waiting threads."""

    def __init__(self, peers: Peers, on_failure: Callable[[], None]) -> None:
        self._peers, self._on_failure = peers, on_failure
        self.error: BaseException | None = None
        """The first failure; None as long as there is none."""
        self.occurred = threading.Event()
        self._lock = threading.Lock()
        self._reporting = threading.Lock()
        self._is_reported = False
        self._reports: list[threading.Thread] = []

    def raise_if_failed(self) -> None:
        if self.error is not None:
            raise self.error

    def fail(self, error: BaseException) -> None:
        """Ends the step on all stages, and every later step. Only the first failure is sent and kept.

        A lost connection is reported too: other stages may not notice it, and would wait for this stage.
        """
        try:
            with self._reporting:  # before a thread of this process sees the failure, and ends it: see `leave`
                is_reported, self._is_reported = self._is_reported, True
                if not is_reported:
                    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
                    self._reports = self._peers.notify_all(MessageKind.FAILED, text)
        finally:
            self._record(error)

    def fail_by_report(self, source: int, traceback_text: str) -> None:
        """Ends the step here because another stage has reported a failure to all stages. Sends nothing itself."""
        self._is_reported = True
        self._record(SMPRuntimeError(f"{self._peers.describe(source)} failed:\n{traceback_text}"))

    def fail_by_loss(self, rank: int) -> None:
        """Ends the step here if the rank is a stage of this pipeline or a partner. The loss of others is only noted."""
        self._peers.lost.add(rank)
        if rank in (*self._peers.ranks, *self._peers.partners):
            self._record(self._peers.lost_error(rank))

    def explain_send_error(self, to: int, error: OSError) -> BaseException:
        """Returns the error to raise instead. Unless `error` says the reason, waits a moment for the other's report."""
        if isinstance(error, (HandshakeError, TimeoutError)):
            return SMPRuntimeError(f"{self._peers.describe(to)} cannot be reached: {error}")
        self._peers.lost.add(to)
        self.occurred.wait(_REASON_SECONDS)
        return self.error or self._peers.lost_error(to)

    def wait_until_reported(self) -> None:
        """This process may end next. Waits at most `_REPORT_SECONDS` for stages that take no messages."""
        deadline = time.monotonic() + _REPORT_SECONDS
        for report in self._reports:
            report.join(max(0, deadline - time.monotonic()))

    def _record(self, error: BaseException) -> None:
        """Keeps the first error, wakes waiting threads and calls `on_failure`; drops later errors."""
        with self._lock:
            if self.error is not None:
                return
            self.error = error
        self.occurred.set()
        self._on_failure()


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
