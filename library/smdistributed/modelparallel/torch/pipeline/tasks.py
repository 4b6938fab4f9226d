"""The tasks of a step, and the modes that torch keeps for each thread: a call to another stage takes both along.

A task is the record of a microbatch, the kind of work and the state of random numbers. `scheduler` runs tasks.

CUDA has a current device for each thread, so that each of our threads must select this rank's.

Random numbers depend on the step, the microbatch and the call, and not on which thread computes first. Threads take
turns on a stage (see `backend.schedule`). With each change of turns, the default generators are switched to the state
of the next task. So dropout draws the same numbers in every run with the same seed.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

from smdistributed.modelparallel.backend.schedule import TurnKind

RandomState = tuple[torch.Tensor, "torch.Tensor | None"]
"""The states of torch's default generators: the CPU's, and this rank's GPU's if it is used."""
_thread = threading.local()
_own_gpu: int | None = None


class StageTask:
    """The work of a thread. `random_state` is kept here while another task has its turn.

    `name`: no other task of the step has it. Ranks that share tensors have the same names.
    """

    __slots__ = ("is_backward", "kind", "microbatch", "name", "random_state", "seed")

    def __init__(self, microbatch: int, kind: TurnKind, seed: int, name: Hashable = None) -> None:
        self.microbatch, self.kind, self.seed, self.name = microbatch, kind, seed, name
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


def remember_device() -> None:
    """Remembers the current device of this thread, the script's, as this rank's device. Does nothing without a GPU."""
    global _own_gpu
    if torch.cuda.is_available():
        _own_gpu = torch.cuda.current_device()


def select_device() -> None:
    """Makes the remembered device the current one of this thread. Does nothing if none was remembered."""
    if _own_gpu is not None:
        torch.cuda.set_device(_own_gpu)


def move_here(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor on this rank's GPU; itself if it is there. May be called on any thread."""
    return tensor.cuda(_own_gpu)


def move_all_here(nested: Any) -> Any:
    """Copies all tensors in nested containers to this rank's device. Without a GPU it returns `nested` itself."""
    if _own_gpu is None:
        return nested
    return tree_map(lambda value: move_here(value) if isinstance(value, torch.Tensor) else value, nested)


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
