"""What stages send each other: a kind, the step and the microbatch it belongs to, and tensors."""

from __future__ import annotations

import enum
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from smdistributed.core.mail import Mail
from smdistributed.modelparallel.torch.devices import move_here
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
    WORKING = 8


class Came(NamedTuple):
    """A tensor of a message, on the CPU, and what was said of it."""

    tensor: torch.Tensor
    meta: Meta

    def here(self) -> torch.Tensor:
        """On this thread's GPU, if it came from one."""
        return move_here(self.tensor) if self.meta[3] else self.tensor


class Message(NamedTuple):
    """call: the number of the call it belongs to, counted by the stage that asks. about: what the kind needs."""

    kind: Kind
    source: int
    step: int
    microbatch: int
    call: Any
    about: Any
    tensors: Sequence[Came | None]

    def all_here(self) -> list[torch.Tensor | None]:
        """The tensors on this thread's device; None where there is none."""
        return [came and came.here() for came in self.tensors]

    def for_autograd(self) -> list[tuple[torch.Tensor, bool]]:
        """Those that are there, each with whether it requires grad."""
        return [(came.here(), came.meta[2]) for came in self.tensors if came is not None]


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
    tensors = [None if meta is None else Came(from_buffer(next(rest), meta), meta) for meta in metas]
    return Message(Kind(kind), source, step, microbatch, call, about, tensors)
