"""What stages send each other: a kind, the step and the microbatch it belongs to, and tensors."""

from __future__ import annotations

import enum
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from smdistributed.core.mail import Mail
from smdistributed.modelparallel.torch.packing import Meta, from_buffer, meta_of, to_buffer


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


class Message(NamedTuple):
    """call: the number of the call it belongs to, counted by the stage that asks. about: what the kind needs."""

    kind: Kind
    source: int
    step: int
    microbatch: int
    call: Any
    about: Any
    tensors: Sequence[tuple[torch.Tensor, bool] | None]
    """Each with whether it requires grad; None where there is none."""


def send(
    mail: Mail,
    to: int,
    kind: Kind,
    step: int,
    microbatch: int = -1,
    call: object = None,
    about: object = None,
    tensors: Sequence[torch.Tensor | None] = (),
) -> None:
    """Send a message to that rank of the job."""
    metas = [None if tensor is None else meta_of(tensor) for tensor in tensors]
    held = [to_buffer(tensor) for tensor in tensors if tensor is not None]
    head = pickle.dumps((int(kind), step, microbatch, call, about, metas), pickle.HIGHEST_PROTOCOL)
    mail.send(to, head, [buffer for buffer, _ in held])


def receive(source: int, head: bytes, bodies: Sequence[bytearray]) -> Message:
    """The message that `send` sent."""
    kind, step, microbatch, call, about, metas = pickle.loads(head)
    rest = iter(bodies)
    tensors = [None if meta is None else _tensor(next(rest), meta) for meta in metas]
    return Message(Kind(kind), source, step, microbatch, call, about, tensors)


def _tensor(buffer: bytearray, meta: Meta) -> tuple[torch.Tensor, bool]:
    return from_buffer(buffer, meta), meta[2]
