"""Checkpoints: what was saved on CUDA, or is mapped to it, is loaded on the CPU."""

from __future__ import annotations

from typing import Any

import torch

from smdistributed.rehearsal.torch import devices

_BEFORE_TORCHS_OWN = 5  # torch's restorers have 10 and more


def stand_in(_: int) -> None:
    """Register with torch.serialization what restores a storage whose location is CUDA."""
    torch.serialization.register_package(_BEFORE_TORCHS_OWN, lambda storage: None, _restore)


def _restore(storage: Any, location: str) -> Any:
    """Return the storage for a location of ours; None leaves it to torch. An ordinal must exist, as with CUDA."""
    if not devices.is_cuda(location):
        return None
    devices.cuda(location)
    return storage
