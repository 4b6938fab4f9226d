"""On which pretended device each tensor is.

A tensor is on a CUDA device, on the CPU, or its place is unknown: it was made where torch's functions are not seen (in
C++, in another process). What cannot be known is never an error.

Kept beside the tensors, not on them: an attribute would travel into checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Optional

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from shoal_rehearsal.torch.devices import CPU

Place = Optional[torch.device]
_places: Any = WeakTensorKeyDictionary()


def place_of(tensor: torch.Tensor) -> Place:
    """Where a tensor is; None where that is unknown."""
    place: Place = _places.get(tensor)
    return place


def put(value: object, place: Place) -> None:
    """Note where the tensors in a value are, whatever was known before."""
    for tensor in tensors_in((value,)):
        if place is None:
            _places.pop(tensor, None)
        else:
            _places[tensor] = place


def inherit(value: object, place: Place) -> None:
    """Note where the tensors in a value are, but for those whose place is known."""
    if place is not None:
        for tensor in tensors_in((value,)):
            if tensor not in _places:
                _places[tensor] = place


def common_place(tensors: Iterable[torch.Tensor]) -> Place:
    """Where the result of an operation on these tensors is: CUDA if one of them is there, else the CPU if all are."""
    found = [place_of(tensor) for tensor in tensors]
    for place in found:
        if place is not None and place.type == "cuda":
            return place
    return CPU if found and None not in found else None


def tensors_in(values: Iterable[object]) -> Iterator[torch.Tensor]:
    """The tensors among values, and in lists and tuples of them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)
