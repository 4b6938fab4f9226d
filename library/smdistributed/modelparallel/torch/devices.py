"""The GPU of this rank. CUDA keeps the current one for each thread: those that receive and work have to be told."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

_index: int | None = None


def note() -> None:
    """This rank's device is the one that this thread, the script's, has now."""
    global _index
    if torch.cuda.is_available():
        _index = torch.cuda.current_device()


def use() -> None:
    """Have this thread use it."""
    if _index is not None:
        torch.cuda.set_device(_index)


def move_here(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` on it, on whichever thread."""
    return tensor.cuda(_index)


def move_all_here(nested: Any) -> Any:
    """`nested` with its tensors on it; without a GPU as it is."""
    if _index is None:
        return nested
    return tree_map(lambda value: move_here(value) if isinstance(value, torch.Tensor) else value, nested)
