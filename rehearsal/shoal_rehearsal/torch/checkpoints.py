"""Loads checkpoints of CUDA tensors, and lets activation checkpointing ignore emulated devices."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import checkpoint

from shoal_rehearsal.torch import devices

_BEFORE_TORCHS_OWN = 5  # torch's restorers have 10 and more


def patch(_: int) -> None:
    """Lets torch load storages of CUDA tensors, and activation checkpointing ignore emulated devices.

    It compares saved tensors, seen without the mode, with recomputed ones, seen with it: their devices would differ.
    """
    torch.serialization.register_package(_BEFORE_TORCHS_OWN, lambda storage: None, _restore)
    checks: dict[str, Callable[[torch.Tensor], Any]] = getattr(checkpoint, "_allowed_determinism_checks_to_fns", {})
    for name, found in checks.items():
        checks[name] = _without_devices(found)


def _without_devices(function: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    @functools.wraps(function)
    def describe(tensor: torch.Tensor) -> Any:
        with torch._C.DisableTorchFunction():
            return function(tensor)

    return describe


def _restore(storage: Any, location: str) -> Any:
    """Returns the storage if its location is CUDA; None leaves it to torch. Raises RuntimeError for no such device."""
    if not devices.is_cuda(location):
        return None
    devices.resolve(location)
    return storage
