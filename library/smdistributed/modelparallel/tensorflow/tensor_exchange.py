"""Sends and receives tensors of a step's graph, and Python objects, between the ranks of a job.

It warns of stalls, and ends waits that exceed the time limit. The head of a tensor's message is JSON. An object is a
pickle in the head of its message. Heads prove that they come from a rank of this job (see `core.frames`), bodies do
not.
"""

from __future__ import annotations

import ctypes
import json
import math
import pickle
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

from smdistributed.core import timeline
from smdistributed.core.diagnostics import StallDetector
from smdistributed.core.native import ITEM_BYTES
from smdistributed.core.tensorflow import operations
from smdistributed.core.tensorflow.operations import PendingOperation
from smdistributed.modelparallel.backend.config import CONNECTION_LOST, TIMEOUT_FIX, timeout_seconds
from smdistributed.modelparallel.backend.exceptions import SMPRuntimeError
from smdistributed.modelparallel.backend.object_exchange import ObjectExchange
from smdistributed.modelparallel.backend.transport import Access, Transport, Waiter

NEW_RUN = "new run"
"""The label of the message that a rank sends to itself when a step begins."""
_CHECKS_PER_LIMIT = 4
_OBJECT = b"object "


class ReceivedTensor(NamedTuple):
    """A tensor that has arrived. `run`: the number of the sender's step."""

    dtype: str
    shape: tuple[int, ...]
    memory: bytearray
    run: int


class _Awaited(NamedTuple):
    source: int
    label: str
    waiter: Waiter
    since: float
    """In seconds of time.monotonic()."""


class TensorExchange:
    """Exchanges tensors by their labels, and Python objects by `objects`.

    Starts two threads, and the threads of `transport`. `names` describes messages by label, for errors.
    """

    def __init__(self, rank: int, access: Access) -> None:
        self._rank = rank
        self.names: dict[str, str] = {}
        self._lock = threading.Lock()
        self._inboxes: dict[tuple[int, str], deque[ReceivedTensor]] = defaultdict(deque)
        self._lost_ranks: set[int] = set()
        self._run = 0  # every rank counts the steps that it runs, and sends its number with each tensor
        self._latest_runs: dict[int, int] = defaultdict(int)
        self._awaited: _Awaited | None = None
        self._overdue: _Awaited | None = None
        self._stalls, self._timeout = StallDetector(), timeout_seconds()
        self.objects = ObjectExchange(rank, self._send_object, pickle.loads, self._timeout)
        self.transport = Transport(rank, access, self._deliver, self._on_lost, self._timeout)
        operations.load()
        for what in (self._serve, self._watch):
            threading.Thread(target=what, name=f"smp{what.__name__}", daemon=True).start()

    def _serve(self) -> None:
        """Body of a thread: runs the graph's send and receive operations, for ever."""
        operations.serve_forever(self._run_operation, messages=True)

    def _run_operation(self, operation: PendingOperation) -> None:
        """Runs a send, a receive or the begin of a step; a receive blocks. Its error becomes the operation's."""
        kind, label = operations.KINDS[operation.kind], operation.name.decode()
        if label == NEW_RUN:
            self._begin_run()
            return
        with timeline.span("communication", kind, {"label": label, "rank": operation.rank}):
            if kind == "send":
                self._send(operation, label)
            else:
                self._receive(operation, label)

    def _send(self, operation: PendingOperation, label: str) -> None:
        """Sends an operation's tensor, without copying it. Raises SMPRuntimeError if the connection is lost."""
        ((address, _, elements),) = operation.tensors()
        size = elements * ITEM_BYTES[operation.dtype_name]
        memory = [memoryview((ctypes.c_char * size).from_address(address)).cast("B")] if size else [b""]
        head = json.dumps([label, operation.dtype_name, operation.shape[: operation.dims], self._run])
        try:
            self.transport.send(operation.rank, head.encode(), memory)
        except OSError as error:
            raise SMPRuntimeError(
                f"Rank {operation.rank}: {CONNECTION_LOST} Rank {self._rank} was sending it {self._describe(label)} "
                f"({error})."
            ) from error

    def _receive(self, operation: PendingOperation, label: str) -> None:
        """Waits for a tensor and copies it into the operation's result. Raises SMPRuntimeError if it does not fit."""
        received = self._take(operation.rank, label)
        if received.dtype != operation.dtype_name:
            raise SMPRuntimeError(
                f"Rank {operation.rank} sends {received.dtype} where rank {self._rank} expects {operation.dtype_name} "
                f"({self._describe(label)}): their models differ. Fix: run the same script on all ranks."
            )
        size = len(received.memory)
        if size != math.prod(received.shape) * ITEM_BYTES[received.dtype]:
            raise SMPRuntimeError(
                f"Rank {operation.rank} sends {size} bytes as {received.dtype} of shape {received.shape} "
                f"({self._describe(label)}), which does not fit. Fix: run the same script on all ranks."
            )
        address = operations.allocate_result(operation, received.shape)
        if size:
            ctypes.memmove(address, (ctypes.c_char * size).from_buffer(received.memory), size)

    def _take(self, source: int, label: str) -> ReceivedTensor:
        """Waits for a tensor of this run. Raises SMPRuntimeError if its rank is lost, has left the step, or is late."""
        with self._lock:
            inbox = self._inboxes[source, label]
            awaited = None
            can_come = source not in self._lost_ranks and self._latest_runs[source] <= self._run
            if not self._has_tensor(inbox) and can_come:
                self._awaited = awaited = _Awaited(source, label, Waiter(), time.monotonic())
        if awaited is not None:
            self.transport.wait(awaited.waiter)
        with self._lock:
            self._awaited = None
            if not self._has_tensor(inbox):
                raise self._missing(source, label, awaited is not None and self._overdue is awaited)
            received = inbox.popleft()
            if not inbox:
                del self._inboxes[source, label]
            return received

    def _missing(self, source: int, label: str, is_overdue: bool) -> SMPRuntimeError:
        if is_overdue:
            return SMPRuntimeError(
                f"Rank {source} has not sent its {self._describe(label)} to rank {self._rank} "
                f"within {self._timeout:g} s. {TIMEOUT_FIX}"
            )
        lost = f"Rank {source}: {CONNECTION_LOST}"
        left = f"Rank {source} has left this step. Fix: look for the error that it reported itself."
        reason = lost if source in self._lost_ranks else left
        return SMPRuntimeError(f"{reason} Rank {self._rank} was waiting for its {self._describe(label)}.")

    def _has_tensor(self, inbox: deque[ReceivedTensor]) -> bool:
        return bool(inbox) and inbox[0].run == self._run

    def _describe(self, label: str) -> str:
        return self.names.get(label, f"message {label}")

    def _send_object(self, to: int, inbox: str, obj: object) -> None:
        self.transport.send(to, b"%b%b\n" % (_OBJECT, inbox.encode()) + pickle.dumps(obj, pickle.HIGHEST_PROTOCOL))

    def _deliver(self, source: int, head: bytes, bodies: Sequence[bytearray]) -> None:
        """Called on receiving threads. Tensors of earlier steps are dropped. One of a later step makes a wait fail."""
        if head.startswith(_OBJECT):
            inbox, _, pickled = head[len(_OBJECT) :].partition(b"\n")
            self.objects.deliver(source, inbox.decode(), pickled)
            return
        name, dtype, shape, run = json.loads(head)
        with self._lock:
            self._latest_runs[source] = max(run, self._latest_runs[source])
            if run >= self._run:
                self._inboxes[source, name].append(ReceivedTensor(dtype, tuple(shape), bodies[0], run))
            if self._awaited:
                self._wake(source, name if run == self._run else self._awaited.label)

    def _begin_run(self) -> None:
        """Drops tensors that were sent to a step that has failed, and forgets reported stalls."""
        with self._lock:
            self._run += 1
            self._stalls.reset()
            for key, inbox in list(self._inboxes.items()):
                self._inboxes[key] = deque(tensor for tensor in inbox if tensor.run >= self._run)
                if not self._inboxes[key]:
                    del self._inboxes[key]

    def _on_lost(self, source: int) -> None:
        """Called on a receiving thread when the connection to a rank has ended: its waiters fail."""
        with self._lock:
            self._lost_ranks.add(source)
            if self._awaited:
                self._wake(source, self._awaited.label)
        self.objects.lost(source)

    def _wake(self, source: int, label: str) -> None:
        """Wakes the thread that waits for this message, if one does. The caller holds the lock."""
        if self._awaited and self._awaited[:2] == (source, label):
            self.transport.wake(self._awaited.waiter)

    def _watch(self) -> None:
        """Thread, never ends: warns once after SMDDP_STALL_SECONDS of waiting, and ends a wait past the time limit."""
        while True:
            time.sleep(min(self._stalls.seconds, self._timeout) / _CHECKS_PER_LIMIT)
            awaited = self._awaited
            waited = time.monotonic() - awaited.since if awaited else 0.0
            if awaited and waited > self._timeout:
                self._overdue = awaited
                self.transport.wake(awaited.waiter)
            elif awaited and self._stalls.is_new_stall(awaited.waiter, waited):
                what = f"rank {self._rank} has waited {self._stalls.seconds:g} s for rank {awaited.source}: its"
                print(f"smp: {what} {self._describe(awaited.label)}", file=sys.stderr, flush=True)
