"""torch.distributed: NCCL is answered by gloo; other backends are as they are, and see CPU tensors."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
import torch.distributed as dist

from smdistributed.rehearsal.torch import devices


def stand_in(_: int) -> None:
    """Translate the backends of torch.distributed, where this torch has it."""
    if not dist.is_available():
        return
    dist.is_nccl_available = lambda: True
    backends: Any = dist.Backend
    register = backends.register_backend

    @functools.wraps(register)
    def register_unseen(name: str, func: Any, *args: Any, **kwargs: Any) -> None:
        register(name, _creator(func), *args, **kwargs)

    backends.register_backend = staticmethod(register_unseen)
    for name in ("init_process_group", "new_group"):
        _replace(name, _without_nccl)
    _replace("barrier", _without_device_ids)
    _replace("all_reduce", _averaging)


def _replace(name: str, wrap: Any) -> None:
    original = getattr(dist, name)
    replaced = wrap(original)
    for module in (dist, dist.distributed_c10d):
        if getattr(module, name, None) is original:
            setattr(module, name, replaced)


def _without_nccl(function: Any) -> Any:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def with_gloo(*args: Any, **kwargs: Any) -> Any:
        options = signature.bind(*args, **kwargs).arguments
        backend = options.get("backend")
        if backend is None and function.__name__ == "init_process_group":
            options["backend"] = "gloo"
        elif isinstance(backend, str):
            options["backend"] = "gloo" if "nccl" in backend.lower() else backend
        if options.pop("device_id", None) is not None:  # tells NCCL to connect at once
            devices.cuda(kwargs.get("device_id"))
        if "nccl" in str(backend).lower():
            options.pop("pg_options", None)
        return function(**options)

    return with_gloo


def _without_device_ids(function: Any) -> Any:
    @functools.wraps(function)
    def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        for ordinal in device_ids or ():
            devices.checked(ordinal)
        return function(group, async_op)

    return barrier


def _averaging(function: Any) -> Any:
    """NCCL averages, gloo does not."""

    @functools.wraps(function)
    def all_reduce(tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if op != dist.ReduceOp.AVG or dist.get_backend(group) != "gloo":
            return function(tensor, op, group, async_op)
        function(tensor, dist.ReduceOp.SUM, group)
        tensor.div_(dist.get_world_size(group))
        return _Done() if async_op else None

    return all_reduce


class _Done:
    """The work of a collective that has ended."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _creator(create: Any) -> Any:
    """A backend written in Python works on the tensors themselves, which lie in CPU memory."""

    @functools.wraps(create)
    def create_unseen(*args: Any, **kwargs: Any) -> Any:
        group = _unseen(create)(*args, **kwargs)
        for name, method in list(vars(type(group)).items()):
            if inspect.isfunction(method) and not name.startswith("__") and not hasattr(method, "__wrapped__"):
                setattr(type(group), name, _unseen(method))
        return group

    return create_unseen


def _unseen(function: Any) -> Any:
    @functools.wraps(function)
    def without_mode(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return without_mode
