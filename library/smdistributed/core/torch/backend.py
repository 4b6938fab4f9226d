"""The backend `smddp` of torch.distributed, under the name that AWS gives it."""

from __future__ import annotations

import functools
import inspect
import threading
from datetime import timedelta
from typing import Any

import torch.distributed
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d

from smdistributed.core.exceptions import SMDDPError
from smdistributed.core.torch.process_group import ProcessGroup

BACKEND = "smddp"
_BESIDE = {"cpu": ("gloo",), "cuda": ("gloo", "nccl")}
_MAKE = "_new_process_group_helper"


class _Making(threading.local):
    """The backends that were asked for, of the group that this thread makes."""

    wanted = BACKEND


_making = _Making()


def register() -> None:
    """Let torch.distributed know the backend. Doing so twice is no error."""
    if BACKEND in torch.distributed.Backend.backend_list:
        return
    register_backend = torch.distributed.Backend.register_backend
    if "devices" in inspect.signature(register_backend).parameters:  # torch 2.1 and later
        register_backend(BACKEND, create, devices=["cpu", "cuda"])
    else:
        register_backend(BACKEND, create)
    setattr(distributed_c10d, _MAKE, _noting_backends(getattr(distributed_c10d, _MAKE)))


def create(store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroup:
    """Make a group, as torch.distributed asks for one.

    Raises SMDDPError where other backends are asked for beside this one, and it cannot have them.
    """
    return ProcessGroup(store, rank, size, timeout, backends_beside(_making.wanted))


def backends_beside(wanted: str) -> dict[str, str]:
    """The other backends in words such as "cpu:gloo,cuda:smddp", by type of device.

    Raises SMDDPError for one that cannot be beside this.
    """
    pairs = [pair.partition(":") for pair in wanted.lower().split(",") if ":" in pair]
    others = {device: name for device, _, name in pairs if name != BACKEND}
    for device, name in others.items():
        if name not in _BESIDE.get(device, ()):
            allowed = ", ".join(f"{device}:{name}" for device, names in _BESIDE.items() for name in names)
            raise SMDDPError(f"{device}:{name} cannot be beside the backend {BACKEND}: it takes {allowed}.")
    return others


def _noting_backends(make: Any) -> Any:
    """torch tells a backend that is written in Python not what is asked for beside it, and forgets the others."""
    signature = inspect.signature(make)

    @functools.wraps(make)
    def make_and_note(*args: Any, **kwargs: Any) -> Any:
        before, _making.wanted = _making.wanted, str(signature.bind(*args, **kwargs).arguments["backend"])
        try:
            return make(*args, **kwargs)
        finally:
            _making.wanted = before

    return make_and_note
