"""The other stages of a pipeline: how this one names them and sends to them, and how failures end all of them.

The first failure on any stage is sent to all stages, and raised in all their threads.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from smdistributed.core.handshake import HandshakeError
from smdistributed.modelparallel.backend.config import CONNECTION_LOST
from smdistributed.modelparallel.backend.exceptions import SMPRuntimeError
from smdistributed.modelparallel.backend.transport import Transport
from smdistributed.modelparallel.torch.pipeline.messages import MessageKind, send


class Peers:
    """The stages of a pipeline, as one of them sees the others."""

    def __init__(self, transport: Transport, ranks: Sequence[int], rank: int) -> None:
        self._transport, self.ranks = transport, tuple(ranks)
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
        """Sends to every other stage that is not lost. Returns the threads: a full socket must not delay the others."""
        others = [rank for rank in self.ranks if rank != self.ranks[self.index] and rank not in self.lost]
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
        """Ends the step here if the rank is a stage of this pipeline. The loss of another rank is only noted."""
        self._peers.lost.add(rank)
        if rank in self._peers.ranks:
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
