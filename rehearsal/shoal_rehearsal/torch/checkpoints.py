"""Checkpoints: what was saved on CUDA, or is mapped to it, is loaded on the CPU. And of activations."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import checkpoint

from shoal_rehearsal.torch import devices

_BEFORE_TORCHS_OWN = 5  # torch's restorers have 10 and more


def stand_in(_: int) -> None:
    """Register with torch.serialization what restores a storage whose location is CUDA.

    And have torch.utils.checkpoint compare what it saves and recomputes without regard to pretended devices: it sees
    the first while torch handles a function, which is without the mode, and the other in backward, with it.
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
    """Return the storage for a location of ours; None leaves it to torch. An ordinal must exist, as with CUDA."""
    if not devices.is_cuda(location):
        return None
    devices.cuda(location)
    return storage
