"""What a tensor on a pretended device prints: its device, as with CUDA."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from shoal_rehearsal.torch.answers import ANSWERS
from shoal_rehearsal.torch.places import Place, place_of


class _Printed(threading.local):
    place: Place = None


_printed = _Printed()


def stand_in(_: int) -> None:
    """Answer repr, str and format, and extend what torch puts behind a tensor's elements."""
    tensor: Any = torch.Tensor
    for name in ("__repr__", "__format__"):
        ANSWERS[getattr(tensor, name)] = _with_place(getattr(tensor, name))
    strings: Any = torch._tensor_str
    add_suffixes = strings._add_suffixes

    @functools.wraps(add_suffixes)
    def add_device_too(text: str, suffixes: list[str], *args: Any, **kwargs: Any) -> str:
        place, _printed.place = _printed.place, None  # not for a gradient within
        return str(add_suffixes(text, _device(place) + suffixes, *args, **kwargs))

    strings._add_suffixes = add_device_too


def _with_place(function: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(function)
    def text(_: object, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> str:
        with _printing(place_of(tensor)):
            return function(tensor, *args, **kwargs)

    return text


@contextlib.contextmanager
def _printing(place: Place) -> Iterator[None]:
    _printed.place = place
    try:
        yield
    finally:
        _printed.place = None


def _device(place: Place) -> list[str]:
    return [f"device='{place}'"] if place is not None and place.type == "cuda" else []
