"""Prints the emulated device of a tensor, as torch does with CUDA."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from shoal_rehearsal.torch.devices import Placement, placement_of
from shoal_rehearsal.torch.overrides import OVERRIDES


class _Printed(threading.local):
    placement: Placement = None


_printed = _Printed()


def patch(_: int) -> None:
    """Overrides repr, str and format of tensors, so that torch prints an emulated CUDA device. Call it once."""
    tensor: Any = torch.Tensor
    for name in ("__repr__", "__format__"):
        OVERRIDES[getattr(tensor, name)] = _with_placement(getattr(tensor, name))
    strings: Any = torch._tensor_str
    add_suffixes = strings._add_suffixes

    @functools.wraps(add_suffixes)
    def add_device_too(text: str, suffixes: list[str], *args: Any, **kwargs: Any) -> str:
        placement, _printed.placement = _printed.placement, None  # not for a tensor inside, such as a gradient
        return str(add_suffixes(text, _device_suffix(placement) + suffixes, *args, **kwargs))

    strings._add_suffixes = add_device_too


def _with_placement(function: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(function)
    def text(_: object, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> str:
        with _printing(placement_of(tensor)):
            return function(tensor, *args, **kwargs)

    return text


@contextlib.contextmanager
def _printing(placement: Placement) -> Iterator[None]:
    """Notes for the time of `with` the placement of the tensor that is printed."""
    _printed.placement = placement
    try:
        yield
    finally:
        _printed.placement = None


def _device_suffix(placement: Placement) -> list[str]:
    return [f"device='{placement}'"] if placement is not None and placement.type == "cuda" else []
