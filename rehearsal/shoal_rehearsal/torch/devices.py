"""The pretended devices: cuda:0 and on, of which each thread has one that is current."""

from __future__ import annotations

import threading
from typing import Protocol, Union, runtime_checkable

import torch

from shoal_rehearsal import notice

CPU = torch.device("cpu")
# What a tensor of unknown place answers, so that what is made "on its device" is of unknown place as well. It equals
# CPU, and is another object.
UNKNOWN = torch.device("cpu")

DeviceLike = Union[torch.device, "DeviceContext", str, int, None]
_Error: type[RuntimeError] = getattr(torch, "AcceleratorError", RuntimeError)  # what CUDA's errors are, by version
_count = 0


@runtime_checkable
class DeviceContext(Protocol):
    """A torch.cuda.device object."""

    idx: int


class _Thread(threading.local):
    current = 0


_thread = _Thread()


def pretend(count: int) -> None:
    """Have so many devices."""
    global _count
    _count = count


def count() -> int:
    """The number of pretended devices, which torch.cuda.device_count() returns."""
    notice.tell()
    return _count


def current() -> int:
    """The current device of this thread; 0 until it sets another, as with CUDA."""
    return _thread.current


def make_current(ordinal: int) -> int:
    """Make a device current and return the one before; a negative number, "none" to CUDA, changes nothing."""
    before = _thread.current
    if ordinal >= 0:
        _thread.current = checked(ordinal)
    return before


def checked(ordinal: int) -> int:
    """Return an ordinal that exists. Raises what torch raises for CUDA's error 101 otherwise."""
    if 0 <= ordinal < count():
        return ordinal
    raise _Error(
        f"CUDA error: invalid device ordinal\nThis is a rehearsal: cuda:{ordinal} is asked for, and this host pretends "
        f"to have {_count} GPUs, cuda:0 to cuda:{_count - 1}. SHOAL_REHEARSE_GPUS sets how many."
    )


def is_cuda(device: object) -> bool:
    """Whether a value names a CUDA device: a torch.device, or its name. Ordinals are not looked at."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.partition(":")[0] == "cuda"


def cuda(device: DeviceLike = None) -> torch.device:
    """The CUDA device that is meant, with its ordinal: None and "cuda" are the current one.

    A torch.cuda.device object is taken as torch takes it: its ordinal.

    Raises ValueError for a device of another type, and what `checked` raises.
    """
    if device is None:
        return torch.device("cuda", current())
    if isinstance(device, int):
        return torch.device("cuda", current() if device < 0 else checked(device))
    if isinstance(device, DeviceContext):
        return cuda(device.idx)
    found = torch.device(device)
    if found.type != "cuda":
        raise ValueError(f"Expected a cuda device, but got: {found}")
    return torch.device("cuda", current() if found.index is None else checked(found.index))
