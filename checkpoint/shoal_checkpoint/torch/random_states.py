"""The states of Python's, NumPy's and torch's random number generators, also on this rank's CUDA device."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from shoal_checkpoint.position import check_numpy_state


def read_random_states() -> dict[str, Any]:
    """Returns the states of this process. NumPy's only if it is imported, CUDA's only if torch has initialised it."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if numpy := sys.modules.get("numpy"):
        states["numpy"] = numpy.random.get_state()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: Mapping[str, Any]) -> None:
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        import numpy

        check_numpy_state(states["numpy"])
        numpy.random.set_state(states["numpy"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def seed_all(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)  # also of CUDA devices
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


def derive_random_states(states: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Returns states for a rank that was not there when these of another rank were saved: the same ones each time."""
    seed = hashlib.sha256(states["torch"].numpy().tobytes() + str(rank).encode()).digest()
    before = read_random_states()
    seed_all(int.from_bytes(seed[:7], "big"))
    derived = read_random_states()
    set_random_states(before)
    return derived
