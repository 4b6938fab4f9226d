"""Registers the backend `smddp`, AWS's name, with torch.distributed; importing this module registers nothing.

The group is torch's own, like "cpu:smddp,cuda:nccl", if two conditions hold. NCCL can carry its CUDA tensors, and torch
lets Python kernels carry its CPU tensors (`per_device.is_supported`). Otherwise it is a `ProcessGroup`.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d

from smdistributed.core.exceptions import SMDDPError, SMDDPNCCLError
from smdistributed.core.torch import per_device
from smdistributed.core.torch.devices import (
    NCCL_FIX,
    current_device,
    local_nccl_problem,
    nccl_problem,
    publish_nccl_problem,
    select_device,
)
from smdistributed.core.torch.process_group import ProcessGroup
from smdistributed.core.torch.recording import record_nccl

BACKEND = "smddp"
_COMBINABLE = {"cpu": ("gloo",), "cuda": ("gloo", "nccl")}
_MAKE, _SET_TIMEOUT, _RECORD = "_new_process_group_helper", "_set_pg_timeout", "_maybe_attach_flight_recorder"


class _Creation(threading.local):
    """Facts about the group that this thread creates, which torch does not pass to `create`."""

    requested = BACKEND
    """The requested backends."""
    is_torchs = False
    """Whether torch creates the group itself, and needs only a backend for CPU tensors."""
    engine: ProcessGroup | None = None
    """The group that `create` has made for CPU tensors."""


_creation = _Creation()


def register(on_first_group: Callable[[int, int], None] | None = None) -> None:
    """Registers the backend, and patches torch's helper that creates groups; once in a process.

    From torch 2.9 it also patches the helper that sets timeouts, and from torch 2.15 the one that records collectives.
    `on_first_group` is called with this rank and the number of ranks, before the job's first group is created here.
    """
    if BACKEND in torch.distributed.Backend.backend_list:
        return
    register_backend = torch.distributed.Backend.register_backend
    if "devices" in inspect.signature(register_backend).parameters:  # torch 2.1 and later
        register_backend(BACKEND, create, devices=["cpu", "cuda"])
    else:
        register_backend(BACKEND, create)
    setattr(distributed_c10d, _MAKE, _create_per_device(getattr(distributed_c10d, _MAKE), on_first_group))
    if per_device.is_supported():
        setattr(distributed_c10d, _SET_TIMEOUT, _set_engine_timeout(getattr(distributed_c10d, _SET_TIMEOUT)))
    if record := getattr(distributed_c10d, _RECORD, None):
        setattr(distributed_c10d, _RECORD, _record_others(record))


def _record_others(record: Any) -> Any:
    """Wraps torch's helper that records the collectives of a group: torch cannot record one that is in Python."""

    @functools.wraps(record)
    def record_unless_ours(group: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(group, ProcessGroup):
            record(group, *args, **kwargs)

    return record_unless_ours


def create(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Creates a group for torch.distributed: gloo's backend for CPU tensors if the group is torch's own.

    Raises SMDDPError for other requested backends that cannot be combined with this one, and as `open_engine` does.
    """
    group = ProcessGroup(store, rank, size, timeout, other_backends(_creation.requested))
    if not _creation.is_torchs:
        return group
    _creation.engine = group
    return group.gloo


def other_backends(requested: str) -> dict[str, str]:
    """Returns by device type the backends other than `smddp` in a request such as "cpu:gloo,cuda:smddp".

    Raises SMDDPError for a backend that cannot be combined with `smddp`.
    """
    others = {device: name for device, name in _by_device_type(requested).items() if name != BACKEND}
    for device, name in others.items():
        if name not in _COMBINABLE.get(device, ()):
            allowed = ", ".join(f"{device}:{name}" for device, names in _COMBINABLE.items() for name in names)
            raise SMDDPError(
                f"{device}:{name} cannot be combined with the backend {BACKEND}. Fix: use one of {allowed}."
            )
    return others


def _by_device_type(requested: str) -> dict[str, str]:
    if requested.lower() == BACKEND:
        return {"cpu": BACKEND, "cuda": BACKEND}
    pairs = [pair.partition(":") for pair in requested.lower().split(",") if ":" in pair]
    return {device: name for device, _, name in pairs}


def _create_per_device(make: Any, on_first_group: Callable[[int, int], None] | None) -> Any:
    """Wraps torch's helper that creates a group: torch's own NCCL carries CUDA tensors if it can.

    Raises SMDDPNCCLError if it can and does not start. Calls `on_first_group` before the job's first group.
    """
    signature = inspect.signature(make)

    @functools.wraps(make)
    def create_with_nccl(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        requested, before = str(given.arguments["backend"]), vars(_creation).copy()
        on_cpu = _by_device_type(requested).get("cpu", BACKEND)
        if on_first_group is not None and not torch.distributed.is_initialized() and BACKEND in requested.lower():
            on_first_group(given.arguments["group_rank"], given.arguments["group_size"])
        _creation.requested, _creation.engine = requested, None
        _creation.is_torchs = is_torchs = _nccl_carries(_by_device_type(requested), given.arguments)
        if is_torchs:
            given.arguments["backend"] = torch.distributed.Backend(f"cpu:{on_cpu},cuda:nccl")
            _bind_device(given.arguments)
        try:
            made = make(*given.args, **given.kwargs)
            if is_torchs and isinstance(made[0], torch.distributed.ProcessGroup):
                _finish(made[0], requested, _creation.engine)
            return made
        except RuntimeError as error:
            if is_torchs and (_creation.engine is not None or on_cpu != BACKEND):  # the CPU backend is made first
                raise SMDDPNCCLError(f"NCCL does not start: {error}. {NCCL_FIX}") from error
            raise
        finally:
            vars(_creation).clear()
            vars(_creation).update(before)

    return create_with_nccl


def _nccl_carries(requested: Mapping[str, str], given: Mapping[str, Any]) -> bool:
    """Whether NCCL will carry CUDA tensors of a group; the same on all its ranks, which exchange their devices.

    A rank that cannot use NCCL does not wait. For the job's first group, it also selects this rank's device. A rank
    outside the group gets the members' answer of the job's first group. It must ask torch for the same backend as they:
    otherwise torch 2.15 splits NCCL's communicator on this rank alone.
    """
    uses_nccl = requested.get("cuda") in (BACKEND, "nccl")
    if BACKEND not in requested.values() or not uses_nccl or not per_device.is_supported():
        return False
    ranks, is_first = given["global_ranks_in_group"], not torch.distributed.is_initialized()
    rank, size = given["group_rank"], given["group_size"]
    if ranks and torch.distributed.get_rank() not in ranks:
        return per_device.has_kernels()
    store = PrefixStore(f"smddp-devices/{given['group_name']}", given["store"])
    problem = "is in a rehearsal" if _is_rehearsal() else local_nccl_problem()
    if problem:
        publish_nccl_problem(store, rank, problem)
        return False
    if is_first:
        select_device()
    return not nccl_problem(store, rank, size)


def _bind_device(given: dict[str, Any]) -> None:
    """Names this rank's device for the job's first group. NCCL of torch 2.15 would take the local rank's otherwise."""
    binds = hasattr(distributed_c10d, "_create_nccl2_process_group")
    if binds and given.get("device_id") is None and not torch.distributed.is_initialized():
        given["device_id"] = current_device()


def _is_rehearsal() -> bool:
    """Whether `create` is wrapped, as in a rehearsal; its emulated CUDA tensors are in the CPU's memory."""
    return torch.distributed.Backend._plugins[BACKEND.upper()].creator_fn is not create


def _finish(group: Any, requested: str, engine: ProcessGroup | None) -> None:
    """Gives the CPU tensors of torch's own group to `engine`. A timeline then records its NCCL collectives."""
    world = distributed_c10d._world
    _, store = world.pg_map[group]
    world.pg_map[group] = torch.distributed.Backend(requested), store
    if engine is not None:
        per_device.attach_engine(group, engine)
    record_nccl(group)


def _set_engine_timeout(set_timeout: Any) -> Any:
    """Wraps torch's helper: it also sets the timeout of the group's communication engine, which torch lacks."""

    @functools.wraps(set_timeout)
    def set_all(timeout: timedelta, group: Any = None) -> None:
        the_group = group or torch.distributed.group.WORLD
        engine = per_device.engine_of(the_group)
        if engine is not the_group:  # for a Python group torch only warns that it cannot
            set_timeout(timeout, group)
        if engine is not None:
            engine.set_timeout(timeout)

    return set_all
