"""Random numbers that depend on the step, the microbatch and the call, and not on which thread computes first.

Threads take turns on a stage (see `backend.schedule`). With each change of turns, the default generators are switched
to the state of the next task. So dropout draws the same numbers in every run with the same seed.
"""

from __future__ import annotations

import hashlib

import torch

from smdistributed.modelparallel.torch.pipeline.tasks import RandomState, StageTask


def derive_seed(*numbers: int) -> int:
    """Returns a seed of 56 bits. The same numbers give the same seed in every process."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


def draw_seed() -> int:
    """A checkpointed module that is computed again starts from the same state, and draws the same seed."""
    return int(torch.empty((), dtype=torch.int64).random_())


class Generators:
    """Switches torch's default generators between tasks. Call it from one thread at a time."""

    def __init__(self) -> None:
        self._owner: StageTask | None = None
        self._outside = _random_state()

    def hand_to(self, task: StageTask) -> None:
        """Saves the state of the task that had the generators, and restores or seeds the state of `task`."""
        if self._owner is task:
            return
        if self._owner is not None:
            self._owner.random_state = _random_state()
        self._owner = task
        if task.random_state is None:
            torch.default_generator.manual_seed(task.seed)
            if _has_gpu():
                torch.cuda.manual_seed(task.seed)
        else:
            _set_random_state(task.random_state)

    def take_back(self) -> None:
        """Restores the state that the generators had when this object was made."""
        _set_random_state(self._outside)


def _has_gpu() -> bool:
    """Whether this process uses a GPU already. Does not initialize CUDA."""
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return initialized


def _random_state() -> RandomState:
    return torch.get_rng_state(), torch.cuda.get_rng_state() if _has_gpu() else None


def _set_random_state(state: RandomState) -> None:
    """Restores a result of `_random_state`; the GPU's generator stays if it was not used then."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])
