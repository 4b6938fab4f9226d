"""torch.distributed: gloo replaces NCCL, with its rules; other backends run unchanged, on CPU tensors."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
import torch.distributed as dist

from shoal_rehearsal.torch import devices
from shoal_rehearsal.torch.devices import common_placement, set_placement

_MARK = "_shoal_without_mode"
_MOVES = (
    *("all_gather", "all_gather_into_tensor", "all_gather_single", "_all_gather_base", "all_to_all"),
    *("all_to_all_single", "broadcast", "gather", "scatter", "send", "recv", "isend", "irecv"),
)


def patch(_: int) -> None:
    """Patches torch.distributed, if this build of torch has it: gloo replaces NCCL, and gives NCCL's results.

    Backends that are registered later see the real tensors. The tensors of a GradBucket get a placement.
    """
    if not dist.is_available():
        return
    dist.is_nccl_available = lambda: True
    backends: Any = dist.Backend
    register = backends.register_backend

    @functools.wraps(register)
    def register_unseen(name: str, func: Any, *args: Any, **kwargs: Any) -> None:
        register(name, _creating_unseen(func), *args, **kwargs)

    backends.register_backend = staticmethod(register_unseen)
    for name in ("init_process_group", "new_group"):
        _replace(name, _with_gloo)
    _replace("barrier", _checking_device_ids)
    _replace("all_reduce", _reducing_as_nccl)
    for name in ("all_gather_into_tensor", "all_gather_single", "_all_gather_base"):
        _replace(name, _gathering_as_nccl)
    for name in ("reduce_scatter_tensor", "reduce_scatter_single", "_reduce_scatter_base"):
        _replace(name, _scattering_as_nccl)
    for name in _MOVES:
        _replace(name, _moving_booleans)
    bucket: Any = torch._C._distributed_c10d.GradBucket
    for name in ("buffer", "gradients"):
        setattr(bucket, name, _placing_with_parameters(getattr(bucket, name)))


def _placing_with_parameters(method: Any) -> Any:
    """Wraps a method of GradBucket: DistributedDataParallel creates its tensors in C++, unseen by the mode."""

    @functools.wraps(method)
    def tensors(bucket: Any) -> Any:
        made = method(bucket)
        set_placement(made, common_placement(bucket.parameters()))
        return made

    return tensors


def _moving_booleans(function: Any) -> Any:
    """Wraps a collective: booleans are moved as bytes, as NCCL does; gloo rejects them."""

    @functools.wraps(function)
    def moving(*args: Any, **kwargs: Any) -> Any:
        return function(*map(_as_bytes, args), **{name: _as_bytes(value) for name, value in kwargs.items()})

    return moving


def _as_bytes(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_bytes(each) for each in value]
    return value.view(torch.uint8) if isinstance(value, torch.Tensor) and value.dtype == torch.bool else value


def _replace(name: str, wrap: Any) -> None:
    original = getattr(dist, name, None)
    if original is None:  # a name of another version
        return
    replaced = wrap(original)
    for module in (dist, dist.distributed_c10d):
        if getattr(module, name, None) is original:
            setattr(module, name, replaced)


def _with_gloo(function: Any) -> Any:
    """Wraps a function that creates a group: gloo replaces NCCL, and is the default of `init_process_group`.

    NCCL's options and `device_id` are dropped. It raises as CUDA does for a `device_id` that does not exist.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def with_gloo(*args: Any, **kwargs: Any) -> Any:
        kwargs = signature.bind(*args, **kwargs).arguments
        backend = kwargs.get("backend")
        if backend is None and function.__name__ == "init_process_group":
            kwargs["backend"] = "gloo"
        elif isinstance(backend, str):
            kwargs["backend"] = _replacement_backend(backend)
        device = kwargs.pop("device_id", None)  # lets NCCL connect at once
        if device is not None:
            devices.resolve(device)
        if "nccl" in str(backend).lower():
            kwargs.pop("pg_options", None)
        return function(**kwargs)

    return with_gloo


def _replacement_backend(backend: str) -> str:
    """Returns the backend to use, gloo for NCCL. Of several by device it is CUDA's; if that is NCCL, the CPU's."""
    wanted = backend.lower()
    by_device = dict(pair.split(":", 1) for pair in wanted.split(",") if ":" in pair)
    if not by_device:
        return "gloo" if "nccl" in wanted else backend
    found = by_device.get("cuda", "nccl")
    return by_device.get("cpu", "gloo") if found == "nccl" else found


def _checking_device_ids(function: Any) -> Any:
    """Wraps `barrier`: it raises as CUDA does for devices that do not exist, and otherwise ignores them."""

    @functools.wraps(function)
    def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        for ordinal in device_ids or ():
            devices.require_ordinal(ordinal)
        return function(group, async_op)

    return barrier


def _reducing_as_nccl(function: Any) -> Any:
    """Wraps `all_reduce`: on gloo it averages, at once even with `async_op`, and sums booleans to their maximum."""

    @functools.wraps(function)
    def all_reduce(tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if tensor.dtype == torch.bool and dist.get_backend(group) == "gloo":
            tensor, op = _as_bytes(tensor), dist.ReduceOp.MAX if op == dist.ReduceOp.SUM else op
        if op != dist.ReduceOp.AVG or dist.get_backend(group) != "gloo":
            return function(tensor, op, group, async_op)
        function(tensor, dist.ReduceOp.SUM, group)
        tensor.div_(dist.get_world_size(group))
        return _Done() if async_op else None

    return all_reduce


def _gathering_as_nccl(function: Any) -> Any:
    """Wraps a gather into one tensor: on gloo, only numbers of elements must fit, as with NCCL.

    Gloo compares shapes, and lacks it in torch 2.0. Tensors that don't fit or are not contiguous go to gloo unchanged.
    """

    @functools.wraps(function)
    def gather(output_tensor: Any, input_tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        if not _is_flattened(group, output_tensor, input_tensor):
            return function(output_tensor, input_tensor, group, async_op)
        flat, source = output_tensor.view(-1), input_tensor.view(-1)
        if _HAS_SINGLE:
            return function(flat, source, group, async_op)
        return dist.all_gather(list(flat.chunk(dist.get_world_size(group))), source, group, async_op)

    return gather


def _scattering_as_nccl(function: Any) -> Any:
    """Wraps a reduce-scatter as `_gathering_as_nccl` does. On gloo it averages, at once even with `async_op`."""

    @functools.wraps(function)
    def scatter(
        output: Any,
        input: Any,  # noqa: A002 (torch's name)
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if not _is_flattened(group, output, input):
            return function(output, input, op, group, async_op)
        flat, source = output.view(-1), input.view(-1)
        if _HAS_SINGLE and op != dist.ReduceOp.AVG:
            return function(flat, source, op, group, async_op)
        total = source.clone()
        dist.all_reduce(total, op, group)
        flat.copy_(total.chunk(dist.get_world_size(group))[dist.get_rank(group)])
        return _Done() if async_op else None

    return scatter


_HAS_SINGLE = hasattr(dist, "_coalescing_manager")  # torch 2.1 and later


def _is_flattened(group: Any, output: Any, source: Any) -> bool:
    """Whether gloo runs the collective, both tensors are contiguous, and NCCL would accept the numbers of elements."""
    if dist.get_backend(group) != "gloo" or not (output.is_contiguous() and source.is_contiguous()):
        return False
    size = dist.get_world_size(group)
    return bool(output.numel() == size * source.numel() or source.numel() == size * output.numel())


class _Done:
    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _creating_unseen(create: Any) -> Any:
    """Wraps the constructor of a Python backend: its class's methods see the real tensors, in CPU memory."""

    @functools.wraps(create)
    def create_without_mode(*args: Any, **kwargs: Any) -> Any:
        group = _without_mode(create)(*args, **kwargs)
        for name, method in list(vars(type(group)).items()):
            if inspect.isfunction(method) and not name.startswith("__") and not hasattr(method, _MARK):
                setattr(type(group), name, _without_mode(method))
        return group

    return create_without_mode


def _without_mode(function: Any) -> Any:
    @functools.wraps(function)
    def without_mode(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    setattr(without_mode, _MARK, True)
    return without_mode
