"""Lends tensors to gloo's threads, and has them back before the interpreter shuts down.

A gloo thread lets go of a tensor a moment after its collective has ended, and needs the interpreter for that: to count
the Python object down (torch 2.13), or to free it where no Python name holds it any more (torch 2.0). An interpreter
that shuts down ends such a thread, and torch answers with abort: "terminate called without an active exception", exit
code 134 after a training that went well. Destroying the process group at exit would end its threads in time, but every
model wrapped in DistributedDataParallel keeps the group alive.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_GLOO_THREADS = 2  # torch's default: as many tensors may be on their way back
_AT_MOST_SECONDS = 5.0  # a collective that never ends must not keep the process
_lent: list[torch.Tensor] = []


def lend(tensor: torch.Tensor) -> torch.Tensor:
    """Return an alias of `tensor` for a collective: the same memory, shape and dtype, and nobody else's object."""
    older = range(len(_lent) - _GLOO_THREADS + 1)
    for index in reversed(older):
        if not _is_out(index):
            del _lent[index]
    _lent.append(tensor.detach())
    return _lent[-1]


def _is_out(index: int) -> bool:
    """Whether torch holds this object (2.13): somebody does beside the list and getrefcount."""
    return sys.getrefcount(_lent[index]) > 2


@atexit.register
def take_back() -> None:
    """Wait until gloo's threads have let go of what was lent; where torch does not tell (2.0), never free it."""
    deadline = time.monotonic() + _AT_MOST_SECONDS
    for index in range(len(_lent)):
        while _is_out(index) and time.monotonic() < deadline:
            time.sleep(0)  # hands the interpreter to the thread that waits for it
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(_lent[index]))
