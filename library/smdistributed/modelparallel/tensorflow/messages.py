"""Tensors and objects between the ranks of a job: what a step's graph sends and receives, and what scripts do.

The head of a tensor's message is JSON. An object is in the head of its own, as a pickle: heads are known to come from a
rank of this job (see `backend.frames`), bodies are not.
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
from smdistributed.core.tensorflow.operations import Work
from smdistributed.modelparallel.backend.exceptions import SMPRuntimeError
from smdistributed.modelparallel.backend.limits import TIMEOUT_FIX, timeout_seconds
from smdistributed.modelparallel.backend.object_exchange import ObjectExchange
from smdistributed.modelparallel.backend.transport import Access, Transport, Waiter

NEW_RUN = "new run"
"""The label of a message that a rank sends to itself when a step begins."""
_LOOKS = 4
_OBJECT = b"object "


class _Tensor(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    memory: bytearray
    run: int


class Messages:
    """Of this rank. `objects` exchanges Python objects; tensors go by labels: see `core.tensorflow.operations`.

    names: what is awaited with a label, as people call it.
    """

    def __init__(self, rank: int, access: Access) -> None:
        self._rank = rank
        self.names: dict[str, str] = {}
        self._lock = threading.Lock()
        self._boxes: dict[tuple[int, str], deque[_Tensor]] = defaultdict(deque)
        self._gone: set[int] = set()
        self._run = 0  # every rank counts the steps that it runs, and tells its number with what it sends
        self._ahead: dict[int, int] = defaultdict(int)
        self._awaited: tuple[int, str, Waiter, float] | None = None
        self._overdue: object = None
        self._stall, self._timeout = StallDetector().seconds, timeout_seconds()
        self.objects = ObjectExchange(rank, self._send_object, pickle.loads, self._timeout)
        self.transport = Transport(rank, access, self._deliver, self._lost, self._timeout)
        operations.load()
        for what in (self._serve, self._watch):
            threading.Thread(target=what, name=f"smp{what.__name__}", daemon=True).start()

    def _serve(self) -> None:
        operations.serve(self._do, messages=True)

    def _do(self, work: Work) -> None:
        kind, label = operations.KINDS[work.kind], work.name.decode()
        if label == NEW_RUN:
            self._begin_run()
            return
        with timeline.span("communication", kind, {"label": label, "rank": work.rank}):
            if kind == "send":
                self._send(work, label)
            else:
                self._receive(work, label)

    def _send(self, work: Work, label: str) -> None:
        ((address, _, elements),) = work.tensors()
        size = elements * ITEM_BYTES[work.dtype_name]
        memory = [memoryview((ctypes.c_char * size).from_address(address)).cast("B")] if size else [b""]
        head = json.dumps([label, work.dtype_name, work.shape[: work.dims], self._run])
        try:
            self.transport.send(work.rank, head.encode(), memory)
        except OSError as error:
            raise SMPRuntimeError(
                f"Rank {work.rank} is gone, and rank {self._rank} sends its {self._named(label)} there: its own error "
                f"says why ({error})."
            ) from error

    def _receive(self, work: Work, label: str) -> None:
        came = self._take(work.rank, label)
        if came.dtype != work.dtype_name:
            raise SMPRuntimeError(
                f"Rank {work.rank} sends {came.dtype} where rank {self._rank} expects {work.dtype_name} "
                f"({self._named(label)}): their models differ."
            )
        size = len(came.memory)
        if size != math.prod(came.shape) * ITEM_BYTES[came.dtype]:
            raise SMPRuntimeError(
                f"Rank {work.rank} sends {size} bytes as {came.dtype} of shape {came.shape} ({self._named(label)})."
            )
        address = operations.memory_for(work, came.shape)
        if size:
            ctypes.memmove(address, (ctypes.c_char * size).from_buffer(came.memory), size)

    def _take(self, source: int, label: str) -> _Tensor:
        with self._lock:
            box = self._boxes[source, label]
            waiter = awaited = None
            if not self._is_there(box) and source not in self._gone and self._ahead[source] <= self._run:
                waiter = Waiter()
                self._awaited = awaited = source, label, waiter, time.monotonic()
        if waiter is not None:
            self.transport.wait(waiter)
        with self._lock:
            self._awaited = None
            if not self._is_there(box):
                raise self._missing(source, label, awaited is not None and self._overdue is awaited)
            came = box.popleft()
            if not box:
                del self._boxes[source, label]
            return came

    def _missing(self, source: int, label: str, is_overdue: bool) -> SMPRuntimeError:
        if is_overdue:
            return SMPRuntimeError(
                f"Rank {source} has not sent its {self._named(label)} to rank {self._rank} within {self._timeout:g} s. "
                f"{TIMEOUT_FIX}"
            )
        what = "is gone" if source in self._gone else "has left this step"
        return SMPRuntimeError(
            f"Rank {source} {what}, and rank {self._rank} waits for its {self._named(label)}: its own error says why."
        )

    def _is_there(self, box: deque[_Tensor]) -> bool:
        return bool(box) and box[0].run == self._run

    def _named(self, label: str) -> str:
        return self.names.get(label, f"message {label}")

    def _send_object(self, to: int, box: str, obj: object) -> None:
        self.transport.send(to, b"%b%b\n" % (_OBJECT, box.encode()) + pickle.dumps(obj, pickle.HIGHEST_PROTOCOL))

    def _deliver(self, source: int, head: bytes, bodies: Sequence[bytearray]) -> None:
        if head.startswith(_OBJECT):
            box, _, pickled = head[len(_OBJECT) :].partition(b"\n")
            self.objects.deliver(source, box.decode(), pickled)
            return
        name, dtype, shape, run = json.loads(head)
        with self._lock:
            self._ahead[source] = max(run, self._ahead[source])
            if run >= self._run:
                self._boxes[source, name].append(_Tensor(dtype, tuple(shape), bodies[0], run))
            if self._awaited:
                self._wake(source, name if run == self._run else self._awaited[1])

    def _begin_run(self) -> None:
        """A step begins: forget what was sent to one that has failed."""
        with self._lock:
            self._run += 1
            for key, box in list(self._boxes.items()):
                self._boxes[key] = deque(tensor for tensor in box if tensor.run >= self._run)
                if not self._boxes[key]:
                    del self._boxes[key]

    def _lost(self, source: int) -> None:
        with self._lock:
            self._gone.add(source)
            if self._awaited:
                self._wake(source, self._awaited[1])
        self.objects.lost(source)

    def _wake(self, source: int, label: str) -> None:
        if self._awaited and self._awaited[:2] == (source, label):
            self.transport.wake(self._awaited[2])

    def _watch(self) -> None:
        """Say what has been awaited for longer than SMDDP_STALL_SECONDS, once; past the limit, end the wait."""
        told: object = None
        while True:
            time.sleep(min(self._stall, self._timeout) / _LOOKS)
            awaited = self._awaited
            waited = time.monotonic() - awaited[3] if awaited else 0.0
            if awaited and waited > self._timeout:
                self._overdue = awaited
                self.transport.wake(awaited[2])
            elif awaited and awaited is not told and waited > self._stall:
                told = awaited
                what = f"rank {self._rank} has waited {self._stall:g} s for rank {awaited[0]}: its"
                print(f"smp: {what} {self._named(awaited[1])}", file=sys.stderr, flush=True)
