"""Records the emulated device of each tensor, its placement.

A placement is a CUDA device, the CPU, or None for unknown. It is unknown if the mode cannot see how the tensor was
created: in C++, or in another process. An unknown placement is never an error.

Placements are in a dictionary: an attribute of the tensor would be saved in checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Optional

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from shoal_rehearsal.torch.devices import CPU

Placement = Optional[torch.device]
_placements: Any = WeakTensorKeyDictionary()


def placement_of(tensor: torch.Tensor) -> Placement:
    placement: Placement = _placements.get(tensor)
    return placement


def set_placement(value: object, placement: Placement) -> None:
    """Sets the placement of a tensor, or of the tensors in a list or tuple. None forgets it."""
    for tensor in tensors_in((value,)):
        if placement is None:
            _placements.pop(tensor, None)
        else:
            _placements[tensor] = placement


def set_unknown_placement(value: object, placement: Placement) -> None:
    if placement is not None:
        for tensor in tensors_in((value,)):
            if tensor not in _placements:
                _placements[tensor] = placement


def common_placement(tensors: Iterable[torch.Tensor]) -> Placement:
    """Returns CUDA if an input is there, the CPU if all are there, otherwise None."""
    found = [placement_of(tensor) for tensor in tensors]
    for placement in found:
        if placement is not None and placement.type == "cuda":
            return placement
    return CPU if found and None not in found else None


def tensors_in(values: Iterable[object]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)
