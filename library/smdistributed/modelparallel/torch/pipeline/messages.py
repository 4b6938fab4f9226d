"""Messages between stages: a kind, the step and the microbatch they belong to, and tensors or Python objects.

Tensors of any device go through the host's memory: docs/decisions/stages-through-the-host.md has the reasons.
"""

from __future__ import annotations

import enum
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from smdistributed.modelparallel.backend.object_exchange import ObjectExchange
from smdistributed.modelparallel.backend.transport import Transport
from smdistributed.modelparallel.torch.pipeline.packing import Meta, from_buffer, meta_of, pack, to_buffer, unpack
from smdistributed.modelparallel.torch.pipeline.tasks import move_here


class MessageKind(enum.IntEnum):
    """Kinds of messages. Those up to ORDER belong to a step, and wait until their receiver is in it.

    FORWARD and BACKWARD make a call, which ANSWER answers. FINISHED: a microbatch has ended. PARTITION: the stages of
    the modules. END: the step has ended, with its results. ORDER: a turn that the sender has granted. FAILED: a
    failure, as text. OBJECT: of the object exchange. WORKING: the sender computes for long.
    """

    FORWARD = 0
    BACKWARD = 1
    ANSWER = 2
    FINISHED = 3
    PARTITION = 4
    END = 5
    ORDER = 6
    FAILED = 7
    OBJECT = 8
    WORKING = 9


class MessageTensor(NamedTuple):
    """A tensor of a message, on the CPU, and its metadata."""

    tensor: torch.Tensor
    meta: Meta

    def here(self) -> torch.Tensor:
        """The tensor: on this rank's GPU if it came from a GPU, otherwise as it is."""
        return move_here(self.tensor) if self.meta[3] else self.tensor


class StageMessage(NamedTuple):
    """A message of another stage.

    call: the number of the call it belongs to, counted by the stage that calls. about: depends on the kind.
    """

    kind: MessageKind
    source: int
    step: int
    microbatch: int
    call: Any
    about: Any
    tensors: list[MessageTensor | None]

    def all_here(self) -> list[torch.Tensor | None]:
        """Returns the tensors on this thread's device, and None for each place without one."""
        return [received and received.here() for received in self.tensors]

    def for_autograd(self) -> list[tuple[torch.Tensor, bool]]:
        """Returns the tensors on this thread's device, each with whether it requires grad."""
        return [(received.here(), received.meta[2]) for received in self.tensors if received is not None]


def send(
    transport: Transport,
    to: int,
    kind: MessageKind,
    step: int,
    microbatch: int = -1,
    call: object = None,
    about: object = None,
    tensors: Sequence[torch.Tensor | None] = (),
) -> None:
    """Sends a message to a rank. Raises OSError if it cannot be reached, or takes nothing for too long.

    `microbatch`: -1 for none. `call`: the number of the call it belongs to. `about` depends on the kind, and is
    pickled. `tensors`: of any device, dtype and shape; None for an empty place.
    """
    metas = [None if tensor is None else meta_of(tensor) for tensor in tensors]
    held = [to_buffer(tensor) for tensor in tensors if tensor is not None]
    head = (int(kind), step, microbatch, call, about, metas)
    transport.send(to, pickle.dumps(head, pickle.HIGHEST_PROTOCOL), [buffer for buffer, _ in held])


def receive(source: int, head: bytes, bodies: Sequence[bytearray]) -> StageMessage:
    """Makes a message from the bytes that `send` has sent. Unpickles `head`: its sender must be authenticated."""
    kind, step, microbatch, call, about, metas = pickle.loads(head)
    rest = iter(bodies)
    tensors = [meta and MessageTensor(from_buffer(next(rest), meta), meta) for meta in metas]
    return StageMessage(MessageKind(kind), source, step, microbatch, call, about, tensors)


def open_object_exchange(transport: Transport, rank: int, seconds: float) -> ObjectExchange:
    """Deliver messages of `MessageKind.OBJECT` to it. It uses `transport` only when it sends and receives."""

    def send_object(to: int, channel: str, obj: object) -> None:
        body, tensors = pack(obj)
        send(transport, to, MessageKind.OBJECT, 0, call=channel, about=body, tensors=tensors)

    return ObjectExchange(rank, send_object, _read, seconds)


def _read(message: StageMessage) -> Any:
    return unpack(message.about, [tensor for tensor in message.all_here() if tensor is not None])
