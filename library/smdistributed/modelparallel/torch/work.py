"""The piece of work that a thread does: which microbatch it is of, and its own stream of random numbers.

Threads take turns on a stage (see `backend.slot`); with each change of turns the generators change hands, so that
dropout depends on the step, the microbatch and the call, and not on which work came first.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from smdistributed.modelparallel.backend.schedule import Kind

_here = threading.local()


class Work:
    """kind: what it does now. seed: of its random numbers."""

    __slots__ = ("is_backward", "kind", "microbatch", "random", "seed")

    def __init__(self, microbatch: int, kind: Kind, seed: int) -> None:
        self.microbatch, self.kind, self.seed = microbatch, kind, seed
        self.random: Any = None
        self.is_backward = kind is Kind.BACKWARD


def current() -> Work | None:
    """What this thread works on; None: nothing of a step."""
    return getattr(_here, "work", None)


@contextmanager
def working_on(work: Work) -> Iterator[None]:
    before, _here.work = current(), work
    try:
        yield
    finally:
        _here.work = before


def mix(*numbers: int) -> int:
    """A seed that depends on all of these."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


def draw_seed() -> int:
    """A seed from this work's own numbers: a checkpoint that computes again, from the same state, draws it again."""
    return int(torch.empty((), dtype=torch.int64).random_())


class Generators:
    """Torch's default generators, handed from work to work. One thread at a time calls it."""

    def __init__(self) -> None:
        self._owner: Work | None = None
        self._outside = _random_state()

    def hand_to(self, work: Work) -> None:
        """Keep the state for who had it last, and set that of `work`."""
        if self._owner is work:
            return
        if self._owner is not None:
            self._owner.random = _random_state()
        self._owner = work
        if work.random is None:
            torch.default_generator.manual_seed(work.seed)
            if has_gpu():
                torch.cuda.manual_seed(work.seed)
        else:
            _set_random_state(work.random)

    def take_back(self) -> None:
        """Set the state that was there before the step."""
        _set_random_state(self._outside)


def has_gpu() -> bool:
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return initialized


def _random_state() -> tuple[torch.Tensor, torch.Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state() if has_gpu() else None


def _set_random_state(state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])


@dataclass(frozen=True)
class Modes:
    """What torch keeps for each thread, and a call takes along: grad mode and autocast."""

    grad: bool
    autocast: tuple[tuple[str, torch.dtype], ...]

    @classmethod
    def now(cls) -> Modes:
        """Those of this thread."""
        found = []
        if torch.is_autocast_enabled():
            found.append(("cuda", torch.get_autocast_gpu_dtype()))
        if torch.is_autocast_cpu_enabled():
            found.append(("cpu", torch.get_autocast_cpu_dtype()))
        return cls(torch.is_grad_enabled(), tuple(found))

    @contextmanager
    def set(self) -> Iterator[None]:
        """Have them inside `with`."""
        with torch.set_grad_enabled(self.grad), ExitStack() as stack:
            for device, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype))
            yield
