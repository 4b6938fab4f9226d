"""The emulated devices, from cuda:0, and the placement of each tensor.

Each thread has a current device. Counting devices prints the notice.

A placement is a CUDA device, the CPU, or None for unknown. It is unknown if the mode cannot see how the tensor was
created: in C++, or in another process. An unknown placement is never an error. Placements are in a dictionary: an
attribute of the tensor would be saved in checkpoints. A wrapper, such as a DTensor, is where its inner tensors are.
"""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Optional, Protocol, Union, runtime_checkable

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from shoal_rehearsal.settings import GPUS, print_notice

CPU = torch.device("cpu")
# The device that tensors of unknown placement report, so that tensors created "on their device" have unknown placement
# too. It is equal to CPU, but another object.
UNKNOWN = torch.device("cpu")

DeviceLike = Union[torch.device, "DeviceContext", str, int, None]
Placement = Optional[torch.device]
_Error: type[RuntimeError] = getattr(torch, "AcceleratorError", RuntimeError)  # CUDA's errors, by version
_count = 0
_is_used = False
_queued: list[Callable[[], object]] = []
_placements: Any = WeakTensorKeyDictionary()


@runtime_checkable
class DeviceContext(Protocol):
    idx: int


class _Thread(threading.local):
    current = 0


_thread = _Thread()


def set_count(count: int) -> None:
    global _count
    _count = count


def count() -> int:
    """Returns the number of emulated devices, and prints the notice when first called.

    The rank that prints it also says at its end if it has used no device: many examples exit if there are too few.
    """
    if print_notice():
        atexit.register(_report_unused)
    return _count


def _report_unused() -> None:
    if not _is_used:
        print(
            f"SHOAL REHEARSAL: the script counted the GPUs of this host and used none. Emulated GPUs per host: "
            f"{_count}. Fix: if it needs more, set {GPUS} higher, or start more ranks per host.",
            file=sys.stderr,
        )


def queue(calls: Iterable[Callable[[], object]]) -> None:
    """Queues calls for the first use of a device, when torch would initialize CUDA."""
    _queued.extend(calls)


def _initialize() -> None:
    while _queued:
        _queued.pop(0)()


def current() -> int:
    """Returns the ordinal of this thread's current device; 0 until it sets another, as with CUDA."""
    _initialize()
    return _thread.current


def make_current(ordinal: int) -> int:
    """Makes a device current, and returns the previous one. A negative ordinal changes nothing, as with CUDA."""
    before = current()
    if ordinal >= 0:
        _thread.current = require_ordinal(ordinal)
    return before


def require_ordinal(ordinal: int) -> int:
    """Returns an ordinal. Raises as torch does for CUDA's error 101 if there is no such device."""
    global _is_used
    if 0 <= ordinal < count():
        _is_used = True
        return ordinal
    raise _Error(
        f"CUDA error: invalid device ordinal\nThis is a rehearsal: cuda:{ordinal} is requested, and this host has "
        f"{_count} emulated GPUs, cuda:0 to cuda:{_count - 1}. Fix: set SHOAL_REHEARSE_GPUS higher."
    )


def is_cuda(device: object) -> bool:
    """Whether a value is a CUDA device: a torch.device or a name. Ordinals are not recognized."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.partition(":")[0] == "cuda"


def resolve(device: DeviceLike = None) -> torch.device:
    """Returns a CUDA device with its ordinal. None, "cuda" and a negative ordinal are the current device.

    Raises ValueError for a device of another type, and RuntimeError if this host has no emulated GPU of that ordinal.
    """
    return torch.device("cuda", require_ordinal(index_of(device)))


def index_of(device: DeviceLike = None) -> int:
    """Returns the ordinal of a device, as `resolve`, but whether or not this host has it."""
    if isinstance(device, DeviceContext):
        return index_of(device.idx)
    if isinstance(device, int):
        return current() if device < 0 else device
    found = torch.device("cuda" if device is None else device)
    if found.type != "cuda":
        raise ValueError(f"Expected a cuda device, but got: {found}")
    return current() if found.index is None else found.index


def placement_of(tensor: torch.Tensor) -> Placement:
    placements = (_placements.get(plain) for plain in _plain_tensors(tensor))
    return next((placement for placement in placements if placement is not None), None)


def set_placement(value: object, placement: Placement) -> None:
    """Sets the placement of a tensor, or of the tensors in a list or tuple. None forgets it."""
    for tensor in _all_plain_tensors(value):
        if placement is None:
            _placements.pop(tensor, None)
        else:
            _placements[tensor] = placement


def set_unknown_placement(value: object, placement: Placement) -> None:
    if placement is not None:
        for tensor in _all_plain_tensors(value):
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


def _all_plain_tensors(value: object) -> Iterator[torch.Tensor]:
    return (plain for tensor in tensors_in((value,)) for plain in _plain_tensors(tensor))


def _plain_tensors(tensor: Any) -> Iterator[torch.Tensor]:
    """Returns the tensors that hold a tensor's memory: itself, or those inside a wrapper such as a DTensor."""
    if not hasattr(type(tensor), "__tensor_flatten__"):
        yield tensor
        return
    with torch._C.DisableTorchFunction():
        names, _ = tensor.__tensor_flatten__()
        inner = [getattr(tensor, name) for name in names]
    for each in inner:
        yield from _plain_tensors(each)
