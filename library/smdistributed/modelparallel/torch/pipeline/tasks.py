"""The tasks of a step, and the modes that torch keeps for each thread: a call to another stage takes both along.

A task is the record of a microbatch, the kind of work and the state of random numbers. `scheduler` runs tasks.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from smdistributed.modelparallel.backend.schedule import TurnKind

RandomState = tuple[torch.Tensor, "torch.Tensor | None"]
"""The states of torch's default generators: the CPU's, and this rank's GPU's if it is used."""
_thread = threading.local()


class StageTask:
    """The work of a thread. `random_state` is kept here while another task has its turn."""

    __slots__ = ("is_backward", "kind", "microbatch", "random_state", "seed")

    def __init__(self, microbatch: int, kind: TurnKind, seed: int) -> None:
        self.microbatch, self.kind, self.seed = microbatch, kind, seed
        self.random_state: RandomState | None = None
        self.is_backward = kind is TurnKind.BACKWARD


def current_task() -> StageTask | None:
    """The task of this thread; None if the thread is not part of a step."""
    return getattr(_thread, "task", None)


@contextmanager
def as_current_task(task: StageTask) -> Iterator[None]:
    before, _thread.task = current_task(), task
    try:
        yield
    finally:
        _thread.task = before


@dataclass(frozen=True)
class ThreadModes:
    """grad: whether gradients are computed. autocast: pairs of a device type and the dtype that autocast uses there."""

    grad: bool
    autocast: tuple[tuple[str, torch.dtype], ...]

    @classmethod
    def current(cls) -> ThreadModes:
        autocast = []
        if torch.is_autocast_enabled():
            autocast.append(("cuda", torch.get_autocast_gpu_dtype()))
        if torch.is_autocast_cpu_enabled():
            autocast.append(("cpu", torch.get_autocast_cpu_dtype()))
        return cls(torch.is_grad_enabled(), tuple(autocast))

    @contextmanager
    def apply(self) -> Iterator[None]:
        """Sets these modes inside `with`. Autocast for device types that they do not name stays as it is."""
        with torch.set_grad_enabled(self.grad), ExitStack() as stack:
            for device, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype))
            yield
