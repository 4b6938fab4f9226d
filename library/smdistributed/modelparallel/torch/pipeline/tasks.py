"""The task of each thread in a step: a record of the microbatch, the kind of work and the state of random numbers.

It also notes which task the current thread works on. `scheduler` runs tasks.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from smdistributed.modelparallel.backend.schedule import TurnKind

RandomState = tuple[torch.Tensor, "torch.Tensor | None"]
"""The states of torch's default generators: the CPU's, and this rank's GPU's if it is used."""
_thread = threading.local()


class Task:
    """The work of a thread. `random_state` is kept here while another task has its turn.

    Args:
        microbatch: The number of the microbatch, from 0.
        kind: The kind of work that it computes now.
        seed: Seeds the task's random numbers.
    """

    __slots__ = ("is_backward", "kind", "microbatch", "random_state", "seed")

    def __init__(self, microbatch: int, kind: TurnKind, seed: int) -> None:
        self.microbatch, self.kind, self.seed = microbatch, kind, seed
        self.random_state: RandomState | None = None
        self.is_backward = kind is TurnKind.BACKWARD


def current_task() -> Task | None:
    """The task of this thread; None if the thread is not part of a step."""
    return getattr(_thread, "task", None)


@contextmanager
def as_current_task(task: Task) -> Iterator[None]:
    """Makes `task` the one of this thread inside `with`."""
    before, _thread.task = current_task(), task
    try:
        yield
    finally:
        _thread.task = before
