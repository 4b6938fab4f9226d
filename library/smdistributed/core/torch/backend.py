"""The backend `smddp` of torch.distributed, under the name that AWS gives it.

Where NCCL can carry the CUDA tensors of a group, and torch lets kernels in Python have those on the CPU
(`per_device.is_possible`), the group is torch's own, as of "cpu:smddp,cuda:nccl". Otherwise it is `ProcessGroup`.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d

from smdistributed.core.exceptions import SMDDPError, SMDDPNCCLError
from smdistributed.core.torch import per_device
from smdistributed.core.torch.devices import lacks_nccl, leave_to_host, take_device, without_nccl
from smdistributed.core.torch.nccl_timeline import record_nccl
from smdistributed.core.torch.process_group import ProcessGroup

BACKEND = "smddp"
_BESIDE = {"cpu": ("gloo",), "cuda": ("gloo", "nccl")}
_MAKE, _SET_TIMEOUT = "_new_process_group_helper", "_set_pg_timeout"


class _Making(threading.local):
    """What `create` has to know of the group that this thread makes, and torch does not tell it."""

    wanted = BACKEND
    """The backends that were asked for."""
    is_torchs = False
    """Whether torch puts the group together itself, and takes a backend for CPU tensors alone."""
    engine: ProcessGroup | None = None
    """What `create` has made for such a group."""


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
    setattr(distributed_c10d, _MAKE, _by_device(getattr(distributed_c10d, _MAKE)))
    if per_device.is_possible():
        setattr(distributed_c10d, _SET_TIMEOUT, _told_to_engines(getattr(distributed_c10d, _SET_TIMEOUT)))


def create(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Make a group, as torch.distributed asks for one; gloo's backend for the CPU, if the group is torch's own.

    Raises SMDDPError where other backends are asked for beside this one, and it cannot have them.
    """
    group = ProcessGroup(store, rank, size, timeout, backends_beside(_making.wanted))
    if not _making.is_torchs:
        return group
    _making.engine = group
    return group.gloo


def backends_beside(wanted: str) -> dict[str, str]:
    """The other backends in words such as "cpu:gloo,cuda:smddp", by type of device.

    Raises SMDDPError for one that cannot be beside this.
    """
    others = {device: name for device, name in _by_device_type(wanted).items() if name != BACKEND}
    for device, name in others.items():
        if name not in _BESIDE.get(device, ()):
            allowed = ", ".join(f"{device}:{name}" for device, names in _BESIDE.items() for name in names)
            raise SMDDPError(f"{device}:{name} cannot be beside the backend {BACKEND}: it takes {allowed}.")
    return others


def _by_device_type(wanted: str) -> dict[str, str]:
    if wanted.lower() == BACKEND:
        return {"cpu": BACKEND, "cuda": BACKEND}
    pairs = [pair.partition(":") for pair in wanted.lower().split(",") if ":" in pair]
    return {device: name for device, _, name in pairs}


def _by_device(make: Any) -> Any:
    """torch's helper that makes a group, so that it uses its own NCCL where this backend would."""
    signature = inspect.signature(make)

    @functools.wraps(make)
    def make_by_device(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        wanted, before = str(given.arguments["backend"]), vars(_making).copy()
        on_cpu = _by_device_type(wanted).get("cpu", BACKEND)
        _making.wanted, _making.engine = wanted, None
        _making.is_torchs = is_torchs = _nccl_carries(_by_device_type(wanted), given.arguments)
        if is_torchs:
            given.arguments["backend"] = torch.distributed.Backend(f"cpu:{on_cpu},cuda:nccl")
        try:
            made = make(*given.args, **given.kwargs)
            if is_torchs:
                _finish(made[0], wanted, _making.engine)
            return made
        except RuntimeError as error:
            if is_torchs and (_making.engine is not None or on_cpu != BACKEND):  # the CPU's comes first
                raise SMDDPNCCLError(f"NCCL does not start: {error}") from error
            raise
        finally:
            vars(_making).clear()
            vars(_making).update(before)

    return make_by_device


def _nccl_carries(wanted: Mapping[str, str], given: Mapping[str, Any]) -> bool:
    """Whether NCCL carries CUDA tensors of the group that torch's helper is asked for: the same on all its ranks."""
    if BACKEND not in wanted.values() or wanted.get("cuda") not in (BACKEND, "nccl") or not per_device.is_possible():
        return False
    ranks, is_first = given["global_ranks_in_group"], not torch.distributed.is_initialized()
    rank, size = given["group_rank"], given["group_size"]
    if ranks and torch.distributed.get_rank() not in ranks:
        return False
    store = PrefixStore(f"smddp-devices/{given['group_name']}", given["store"])
    problem = "is rehearsed" if _is_rehearsed() else lacks_nccl()
    if problem:
        leave_to_host(store, rank, problem)
        return False
    if is_first:
        take_device()
    return not without_nccl(store, rank, size)


def _is_rehearsed() -> bool:
    """Whether something stands between torch and `create`: a rehearsal, whose CUDA tensors lie in the CPU's memory."""
    return torch.distributed.Backend._plugins[BACKEND.upper()].creator_fn is not create


def _finish(group: Any, wanted: str, engine: ProcessGroup | None) -> None:
    """Have a group of torch's own give its CPU tensors to the engine, and bear the name that was asked for."""
    world = distributed_c10d._world
    _, store = world.pg_map[group]
    world.pg_map[group] = torch.distributed.Backend(wanted), store
    if engine is not None:
        per_device.give_cpu_tensors(group, engine)
    record_nccl(group)


def _told_to_engines(set_timeout: Any) -> Any:
    """torch tells a timeout to the backends that it knows of."""

    @functools.wraps(set_timeout)
    def set_all(timeout: timedelta, group: Any = None) -> None:
        asked = group or torch.distributed.group.WORLD
        engine = per_device.engine_of(asked)
        if engine is not asked:  # torch warns that it cannot tell a group in Python
            set_timeout(timeout, group)
        if engine is not None:
            engine.set_timeout(timeout)

    return set_all
