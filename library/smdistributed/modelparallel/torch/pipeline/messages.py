"""Sends and reads messages between stages: a kind, the step and the microbatch they belong to, and tensors.

Large tensors may be transferred apart from their message and arrive later.
"""

from __future__ import annotations

import enum
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from smdistributed.modelparallel.backend.reservations import Transfer
from smdistributed.modelparallel.backend.transport import Transport
from smdistributed.modelparallel.torch.pipeline.devices import move_here
from smdistributed.modelparallel.torch.pipeline.packing import Meta, from_buffer, meta_of, to_buffer


class Kind(enum.IntEnum):
    """Kinds of messages. Those up to END belong to a step, and wait until their receiver is in it.

    FORWARD and BACKWARD make a call, which ANSWER answers. FINISHED: a microbatch has ended. PARTITION: the stages of
    the modules. END: the step has ended, with its results. FAILED: a failure, as text. OBJECT: of the object exchange.
    WORKING: the sender computes for long. TRANSFER: a signal about a transfer.
    """

    FORWARD = 0
    BACKWARD = 1
    ANSWER = 2
    FINISHED = 3
    PARTITION = 4
    END = 5
    FAILED = 6
    OBJECT = 7
    WORKING = 8
    TRANSFER = 9


_TRANSFERRED = (Kind.FORWARD, Kind.BACKWARD, Kind.ANSWER)
"""Kinds that have all arrived when the first stage ends the step, so that no transfer is pending between steps."""


class ReceivedTensor(NamedTuple):
    """A tensor of a message, on the CPU unless it was transferred between devices, and its metadata."""

    tensor: torch.Tensor
    meta: Meta

    def here(self) -> torch.Tensor:
        """The tensor: on this rank's GPU if it came from a GPU, otherwise as it is."""
        if not self.meta[3]:
            return self.tensor
        if self.tensor.is_cuda:  # its memory belongs to the stream that received it
            self.tensor.record_stream(torch.cuda.current_stream(self.tensor.device))
        return move_here(self.tensor)


class PendingTensors(NamedTuple):
    """Tensors of a message that are transferred apart from it.

    number: the sender's number of the transfer. metas: of the tensors that have not arrived, by place.
    """

    number: int
    metas: dict[int, Meta]


class Message(NamedTuple):
    """A message of another stage.

    call: the number of the call it belongs to, counted by the stage that calls. about: depends on the kind.
    pending: tensors that are transferred from device to device.
    """

    kind: Kind
    source: int
    step: int
    microbatch: int
    call: Any
    about: Any
    tensors: list[ReceivedTensor | None]
    pending: PendingTensors | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all its tensors have arrived."""
        return not (self.pending and self.pending.metas)

    def fill_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        """Puts the transferred tensors into their places, which completes the message."""
        assert self.pending is not None
        for (place, meta), tensor in zip(self.pending.metas.items(), tensors):
            self.tensors[place] = ReceivedTensor(tensor, meta)
        self.pending.metas.clear()

    def all_here(self) -> list[torch.Tensor | None]:
        """Returns the tensors on this thread's device, and None for each place without one."""
        return [received and received.here() for received in self.tensors]

    def for_autograd(self) -> list[tuple[torch.Tensor, bool]]:
        """Returns the tensors on this thread's device, each with whether it requires grad."""
        return [(received.here(), received.meta[2]) for received in self.tensors if received is not None]


class TensorSender(Protocol):
    """Sends large tensors apart from their message: see `transfers.Transfers`."""

    def choose(self, tensors: Sequence[torch.Tensor | None]) -> dict[int, torch.Tensor]:
        """Returns the tensors to send apart, by their places."""

    def prepare(self, to: int, tensors: Sequence[torch.Tensor]) -> Transfer:
        """Copies tensors for a transfer to a rank."""

    def offer(self, transfer: Transfer) -> None:
        """Sends the tensors, now that the head of their message is sent."""


def send(
    transport: Transport,
    to: int,
    kind: Kind,
    step: int,
    microbatch: int = -1,
    call: object = None,
    about: object = None,
    tensors: Sequence[torch.Tensor | None] = (),
    transfers: TensorSender | None = None,
) -> None:
    """Sends a message to a rank of the job.

    Args:
        transport: Carries the message.
        to: The rank.
        kind: The kind of message.
        step: The step it belongs to.
        microbatch: The microbatch it belongs to; -1 for none.
        call: The number of the call it belongs to.
        about: Depends on the kind. It is pickled.
        tensors: Of any device, dtype and shape; None for an empty place.
        transfers: Sends large tensors from device to device. If None, all tensors go with the message.

    Raises:
        OSError: If the rank cannot be reached, or takes nothing for too long.
    """
    chosen = transfers.choose(tensors) if transfers and kind in _TRANSFERRED else {}
    transfer = transfers.prepare(to, list(chosen.values())) if transfers and chosen else None
    metas = [None if tensor is None else meta_of(tensor) for tensor in tensors]
    held = [to_buffer(tensor) for place, tensor in enumerate(tensors) if tensor is not None and place not in chosen]
    head = (int(kind), step, microbatch, call, about, metas, list(chosen), transfer.number if transfer else -1)
    transport.send(to, pickle.dumps(head, pickle.HIGHEST_PROTOCOL), [buffer for buffer, _ in held])
    if transfers and transfer:
        transfers.offer(transfer)


def receive(source: int, head: bytes, bodies: Sequence[bytearray]) -> Message:
    """Makes a message from the bytes that `send` has sent. Unpickles `head`: its sender must be authenticated."""
    kind, step, microbatch, call, about, metas, places, number = pickle.loads(head)
    rest = iter(bodies)
    tensors = [
        None if meta is None or place in places else ReceivedTensor(from_buffer(next(rest), meta), meta)
        for place, meta in enumerate(metas)
    ]
    pending = PendingTensors(number, {place: metas[place] for place in places})
    return Message(Kind(kind), source, step, microbatch, call, about, tensors, pending)
