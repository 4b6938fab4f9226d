"""What stages send each other: a kind, the step and the microbatch it belongs to, and tensors."""

from __future__ import annotations

import enum
import pickle
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from smdistributed.modelparallel.backend.transport import Transport
from smdistributed.modelparallel.torch.devices import move_here
from smdistributed.modelparallel.torch.packing import Meta, from_buffer, meta_of, to_buffer

if TYPE_CHECKING:
    from smdistributed.modelparallel.torch.transfers import Transfers


class Kind(enum.IntEnum):
    """What a message is. Those up to END belong to a step, and wait until their receiver is in it."""

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
"""Messages that all have come when the first stage ends the step: no transfer is under way between steps."""


class Came(NamedTuple):
    """A tensor of a message, on the CPU unless it was transferred between devices, and what was said of it."""

    tensor: torch.Tensor
    meta: Meta

    def here(self) -> torch.Tensor:
        """On this thread's GPU, if it came from one."""
        if not self.meta[3]:
            return self.tensor
        here = move_here(self.tensor)
        if here is self.tensor:  # its memory is of the stream that received it
            here.record_stream(torch.cuda.current_stream())
        return here


class ToCome(NamedTuple):
    """Tensors of a message that come apart from it. number: of the sender's transfer. metas: of each, by its place."""

    number: int
    metas: dict[int, Meta]


class Message(NamedTuple):
    """What another stage has sent.

    call: the number of the call it belongs to, counted by the stage that asks. about: what the kind needs.
    to_come: tensors that are transferred from device to device.
    """

    kind: Kind
    source: int
    step: int
    microbatch: int
    call: Any
    about: Any
    tensors: list[Came | None]
    to_come: ToCome | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all its tensors are there."""
        return not (self.to_come and self.to_come.metas)

    def fill_in(self, tensors: Sequence[torch.Tensor]) -> None:
        """The transferred tensors have come: the message is complete."""
        assert self.to_come is not None
        for (place, meta), tensor in zip(self.to_come.metas.items(), tensors):
            self.tensors[place] = Came(tensor, meta)
        self.to_come.metas.clear()

    def all_here(self) -> list[torch.Tensor | None]:
        """The tensors on this thread's device; None where there is none."""
        return [came and came.here() for came in self.tensors]

    def for_autograd(self) -> list[tuple[torch.Tensor, bool]]:
        """Those that are there, each with whether it requires grad."""
        return [(came.here(), came.meta[2]) for came in self.tensors if came is not None]


def send(
    transport: Transport,
    to: int,
    kind: Kind,
    step: int,
    microbatch: int = -1,
    call: object = None,
    about: object = None,
    tensors: Sequence[torch.Tensor | None] = (),
    transfers: Transfers | None = None,
) -> None:
    """Send a message to that rank of the job.

    transfers: takes large tensors, which go from device to device. None: all go along with the message.
    """
    places = transfers.choose(tensors) if transfers and kind in _TRANSFERRED else []
    large = transfers.prepare(to, [tensors[place] for place in places]) if transfers and places else None
    metas = [None if tensor is None else meta_of(tensor) for tensor in tensors]
    held = [to_buffer(tensor) for place, tensor in enumerate(tensors) if tensor is not None and place not in places]
    head = (int(kind), step, microbatch, call, about, metas, places, large.number if large else -1)
    transport.send(to, pickle.dumps(head, pickle.HIGHEST_PROTOCOL), [buffer for buffer, _ in held])
    if transfers and large:
        transfers.offer(large)


def receive(source: int, head: bytes, bodies: Sequence[bytearray]) -> Message:
    """The message that `send` sent."""
    kind, step, microbatch, call, about, metas, places, number = pickle.loads(head)
    rest = iter(bodies)
    tensors = [
        None if meta is None or place in places else Came(from_buffer(next(rest), meta), meta)
        for place, meta in enumerate(metas)
    ]
    to_come = ToCome(number, {place: metas[place] for place in places})
    return Message(Kind(kind), source, step, microbatch, call, about, tensors, to_come)
