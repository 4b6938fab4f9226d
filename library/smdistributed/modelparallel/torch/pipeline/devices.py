"""The GPU of this rank. CUDA has a current device for each thread, so that each of our threads must select it."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

_index: int | None = None


def remember_device() -> None:
    """Remembers the current device of this thread, the script's, as this rank's device. Does nothing without a GPU."""
    global _index
    if torch.cuda.is_available():
        _index = torch.cuda.current_device()


def select_device() -> None:
    """Makes the remembered device the current one of this thread. Does nothing if none was remembered."""
    if _index is not None:
        torch.cuda.set_device(_index)


def move_here(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor on this rank's GPU; itself if it is there. May be called on any thread."""
    return tensor.cuda(_index)


def move_all_here(nested: Any) -> Any:
    """Copies all tensors in nested containers to this rank's device. Without a GPU it returns `nested` itself."""
    if _index is None:
        return nested
    return tree_map(lambda value: move_here(value) if isinstance(value, torch.Tensor) else value, nested)
