"""Transfers of large tensors from device to device, while the rest of their message goes over the transport.

The head of a message says which of its tensors are transferred. The message is delivered when they have arrived. Later
messages of the same stage wait behind it. One thread carries out one transfer at a time, when both stages are reserved
for it (`backend.reservations`). docs/decisions/stages-through-the-host.md says why this cannot deadlock.
"""

from __future__ import annotations

import functools
import itertools
import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

import torch

from smdistributed.modelparallel.backend.config import TIMEOUT_FIX
from smdistributed.modelparallel.backend.exceptions import SMPRuntimeError
from smdistributed.modelparallel.backend.reservations import Reservations, Signal, Transfer
from smdistributed.modelparallel.backend.transport import Transport
from smdistributed.modelparallel.torch.pipeline import devices
from smdistributed.modelparallel.torch.pipeline.carrier import VARIABLE, Carrier
from smdistributed.modelparallel.torch.pipeline.messages import Kind, Message, send

_REASON_SECONDS = 1.0
_AT_ONCE = (Kind.FAILED, Kind.WORKING)


class Transfers:
    """The transfers of one stage.

    Args:
        carrier: Sends and receives on the device.
        transport: Carries the signals of reservations.
        rank: This rank, also in the carrier's process group.
        deliver: Called with each message when its tensors have arrived, on any thread, one at a time.
        fail: Called when a transfer fails.
        seconds: How long a transfer may take, with all that it waits for.
    """

    def __init__(
        self,
        carrier: Carrier,
        transport: Transport,
        rank: int,
        deliver: Callable[[Message], None],
        fail: Callable[[BaseException], None],
        seconds: float,
    ) -> None:
        self._carrier, self._transport, self._rank, self._seconds = carrier, transport, rank, seconds
        self._deliver, self._fail = deliver, fail
        self._numbers = itertools.count()
        self._reservations = Reservations(rank, self._signal)
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._tensors: dict[Transfer, Sequence[torch.Tensor]] = {}
        self._incomplete: dict[Transfer, Message] = {}
        self._behind: dict[int, deque[Message]] = defaultdict(deque)
        self._delivering = threading.RLock()
        self._deadlines: dict[Transfer, float] = {}
        self._step = 0
        self._early: list[tuple[Signal, Transfer]] = []
        self._stopped = threading.Event()

    def start(self) -> None:
        """Starts a thread that carries out transfers, also those requested before."""
        threading.Thread(target=self._run, name="smp-transfers", daemon=True).start()

    def stop(self) -> None:
        """Asks the thread to end, because the job has failed, and returns at once.

        A transfer in progress is abandoned.
        """
        self._stopped.set()
        self._events.put(lambda: None)

    def begin(self, step: int) -> None:
        """Notes that this stage enters a step. From now on it takes transfers of this step."""
        self._events.put(functools.partial(self._enter, step))

    # --- sending, on the threads of tasks

    def choose(self, tensors: Sequence[torch.Tensor | None]) -> dict[int, torch.Tensor]:
        """Returns the tensors to transfer, by their places.

        They are the tensors that the carrier takes: long ones on this rank's device (see `Carrier.takes`).
        """
        return {
            place: tensor for place, tensor in enumerate(tensors) if tensor is not None and self._carrier.takes(tensor)
        }

    def prepare(self, to: int, tensors: Sequence[torch.Tensor]) -> Transfer:
        """Copies tensors for a transfer, and waits until the device has done so. The message's head has its number."""
        transfer = Transfer(self._rank, to, next(self._numbers))
        self._tensors[transfer] = self._carrier.copy(tensors)
        return transfer

    def offer(self, transfer: Transfer) -> None:
        """Requests a transfer. The head of its message must have been sent."""
        self._events.put(functools.partial(self._begin_transfer, transfer))

    # --- messages, on receiving threads

    def take(self, message: Message) -> None:
        """Takes a message of another stage. Delivers it when it and all earlier messages of that stage are complete.

        Some kinds are delivered at once. A signal goes to the thread of transfers.
        """
        if message.kind is Kind.TRANSFER:
            signal, transfer = message.about
            self._events.put(functools.partial(self._take_signal, Signal(signal), Transfer(*transfer)))
            return
        with self._delivering:
            behind = self._behind[message.source]
            if message.kind in _AT_ONCE or (message.is_complete and not behind):
                self._deliver(message)
                return
            behind.append(message)
            if message.pending and not message.is_complete:
                self._incomplete[Transfer(message.source, self._rank, message.pending.number)] = message

    # --- the thread

    def _run(self) -> None:
        """Thread: carries out transfers until the job fails. An error of its own makes the job fail.

        It waits a moment first: if the job fails meanwhile for another reason, that one counts.
        """
        devices.select_device()
        try:
            while not self._stopped.is_set():
                self._next_event()()
                while self._reservations.ready is not None:
                    self._carry_out(self._reservations.ready)
                    self._reservations.finish()
        except BaseException as error:  # this thread has no caller
            if not self._stopped.wait(_REASON_SECONDS):  # otherwise the failure that stops the job is known
                self._fail(error if isinstance(error, SMPRuntimeError) else self._failure(str(error)))

    def _next_event(self) -> Callable[[], None]:
        """Waits for the next thing to do, and returns the function that does it.

        Raises SMPRuntimeError if a transfer is overdue.
        """
        oldest = next(iter(self._deadlines), None)
        deadline = None if oldest is None else self._deadlines[oldest]
        try:
            return self._events.get(timeout=None if deadline is None else max(0, deadline - time.monotonic()))
        except queue.Empty:
            assert oldest is not None
            other = oldest.peer_of(self._rank)
            raise self._failure(f"rank {other} has not begun for {self._seconds:g} s. {TIMEOUT_FIX}") from None

    def _failure(self, why: str) -> SMPRuntimeError:
        """Makes the error for a transfer that failed; it names the setting that avoids transfers."""
        return SMPRuntimeError(
            f"Rank {self._rank} cannot exchange tensors with another stage from device to device: {why}\n"
            f"{VARIABLE}=host on all ranks sends them through the host's memory."
        )

    def _begin_transfer(self, transfer: Transfer) -> None:
        """Sets the deadline of a transfer that this stage sends, and offers it."""
        self._deadlines[transfer] = time.monotonic() + self._seconds
        self._reservations.offer(transfer)

    def _enter(self, step: int) -> None:
        """Notes the step, and takes the signals of its transfers that came early."""
        self._step, early = step, self._early
        self._early = []
        for signal in early:
            self._take_signal(*signal)

    def _take_signal(self, signal: Signal, transfer: Transfer) -> None:
        """Takes a signal of another stage. A first one allocates memory for its tensors, or waits for a later step."""
        if transfer.receiver == self._rank and transfer not in self._tensors:
            with self._delivering:
                message = self._incomplete[transfer]
            assert message.pending is not None
            if message.step > self._step:  # collectives that the script calls between steps come first, on all ranks
                self._early.append((signal, transfer))
                return
            self._deadlines[transfer] = time.monotonic() + self._seconds
            self._tensors[transfer] = self._carrier.allocate(list(message.pending.metas.values()))
        self._reservations.take(signal, transfer)

    def _signal(self, to: int, signal: Signal, transfer: Transfer) -> None:
        """Sends a signal about a transfer to a rank; does not wait for an answer."""
        send(self._transport, to, Kind.TRANSFER, self._step, about=(int(signal), tuple(transfer)))

    def _carry_out(self, transfer: Transfer) -> None:
        """Sends or receives a transfer's tensors, and waits for them. If this stage receives, delivers the message."""
        tensors, peer = self._tensors.pop(transfer), transfer.peer_of(self._rank)
        exchange = self._carrier.send if transfer.sender == self._rank else self._carrier.receive
        exchange(tensors, peer, self._stopped, self._seconds)
        del self._deadlines[transfer]
        if transfer.receiver == self._rank:
            with self._delivering:
                self._complete(self._incomplete.pop(transfer), tensors)

    def _complete(self, message: Message, tensors: Sequence[torch.Tensor]) -> None:
        """Fills a message with its tensors, and delivers it and the complete messages behind it."""
        message.fill_tensors(tensors)
        behind = self._behind[message.source]
        while behind and behind[0].is_complete:
            self._deliver(behind.popleft())
