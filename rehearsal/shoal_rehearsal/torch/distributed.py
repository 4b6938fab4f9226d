"""torch.distributed: gloo replaces NCCL, with its rules; other backends run unchanged, on CPU tensors."""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

import torch
import torch.distributed as dist

from shoal_rehearsal.torch import devices
from shoal_rehearsal.torch.devices import common_placement, set_placement

_MARK = "_shoal_without_mode"


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
    for names, wrap in _WRAPPED:
        for name in names:
            _replace(name, wrap)
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
    for module_name, module in list(sys.modules.items()):  # torch's modules import names from each other
        if module_name.startswith("torch.distributed") and vars(module).get(name) is original:
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


def _without_device(function: Any) -> Any:
    """Wraps `_coalescing_manager`: without a device, it needs no support in the backend, which gloo lacks."""

    @functools.wraps(function)
    def coalesce(group: Any = None, device: Any = None, async_ops: bool = False) -> Any:
        return function(group, None, async_ops)

    return coalesce


def _checking_device_ids(function: Any) -> Any:
    """Wraps `barrier`: it raises as CUDA does for devices that do not exist, and otherwise ignores them."""

    @functools.wraps(function)
    def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        for ordinal in device_ids or ():
            devices.require_ordinal(ordinal)
        return function(group, async_op)

    return barrier


def _reducing_as_nccl(function: Any) -> Any:
    """Wraps a reduction: on gloo it averages and scales as NCCL does, and sums booleans to their maximum.

    NCCL multiplies numbers before it sums them. Averages of integers are divided at once, even with `async_op`.
    """
    signature = inspect.signature(function)
    source_name = next(name for name in _SOURCES if name in signature.parameters)

    @functools.wraps(function)
    def reduce(*args: Any, **kwargs: Any) -> Any:
        kwargs = signature.bind(*args, **kwargs).arguments
        op, group, source = kwargs.get("op", dist.ReduceOp.SUM), kwargs.get("group"), kwargs[source_name]
        sources = [source] if isinstance(source, torch.Tensor) else source
        if dist.get_backend(group) != "gloo":
            return function(**kwargs)
        if sources[0].dtype == torch.bool:
            kwargs.update({name: _as_bytes(value) for name, value in kwargs.items()})
            return function(**{**kwargs, "op": dist.ReduceOp.MAX if op == dist.ReduceOp.SUM else op})
        if (factor := _factor(op, group)) is None:
            return _with_future(function(**kwargs), kwargs)
        if not sources[0].is_floating_point():
            return _averaging_integers(function, kwargs)
        scaled = [each.detach() * factor for each in sources]
        if _OUTPUTS.isdisjoint(kwargs):  # it works in place
            for each, value in zip(sources, scaled):
                each.detach().copy_(value)
        else:
            kwargs[source_name] = scaled[0] if isinstance(source, torch.Tensor) else scaled
        return _with_future(function(**{**kwargs, "op": dist.ReduceOp.SUM}), kwargs)

    return reduce


_SOURCES = ("input_list", "input", "input_tensor", "tensors", "tensor")
_OUTPUTS = {"output", "output_tensor"}


def _factor(op: Any, group: Any) -> float | None:
    """Returns the number by which NCCL multiplies tensors before it sums them. None: it does not."""
    if op == dist.ReduceOp.AVG:
        return 1 / dist.get_world_size(group)
    return float(op.__getstate__()[1]) if op == dist.ReduceOp.PREMUL_SUM else None


def _averaging_integers(function: Any, kwargs: dict[str, Any]) -> Any:
    work = function(**{**kwargs, "op": dist.ReduceOp.SUM, "async_op": True})
    work.wait()
    reduced: Any = kwargs.get("output", kwargs.get("tensor", kwargs.get("tensors")))
    for tensor in [reduced] if isinstance(reduced, torch.Tensor) else reduced:
        tensor.div_(dist.get_world_size(kwargs.get("group")), rounding_mode="trunc")
    return work if kwargs.get("async_op") else None


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
    """Wraps a reduce-scatter as `_gathering_as_nccl` does. In torch 2.0 it ends at once, even with `async_op`."""

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
        if _HAS_SINGLE:
            return function(flat, source, op, group, async_op)
        total = source.clone()
        dist.all_reduce(total, op, group)
        flat.copy_(total.chunk(dist.get_world_size(group))[dist.get_rank(group)])
        return _completed([flat]) if async_op else None

    return scatter


_HAS_SINGLE = hasattr(dist, "_coalescing_manager")  # torch 2.1 and later


def _is_flattened(group: Any, output: Any, source: Any) -> bool:
    """Whether gloo runs the collective, both tensors are contiguous, and NCCL would accept the numbers of elements."""
    if dist.get_backend(group) != "gloo" or not (output.is_contiguous() and source.is_contiguous()):
        return False
    size = dist.get_world_size(group)
    return bool(output.numel() == size * source.numel() or source.numel() == size * output.numel())


def _with_future(work: Any, kwargs: dict[str, Any]) -> Any:
    """Returns a handle with `get_future`. Gloo's reduce-scatter has none, so that this one waits for its end."""
    if type(work) is not torch._C._distributed_c10d.Work or "output" not in kwargs:
        return work
    work.wait()
    return _completed([kwargs["output"]])


def _completed(result: Any) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(result)
    implementation: Any = torch._C._distributed_c10d
    return implementation._create_work_from_future(future)


def _creating_unseen(create: Any) -> Any:
    """Wraps the constructor of a Python backend: its class's methods see the real tensors, in CPU memory."""

    @functools.wraps(create)
    def create_without_mode(*args: Any, **kwargs: Any) -> Any:
        group = without_mode(create)(*args, **kwargs)
        for name, method in list(vars(type(group)).items()):
            if inspect.isfunction(method) and not name.startswith("__") and not hasattr(method, _MARK):
                setattr(type(group), name, without_mode(method))
        return group

    return create_without_mode


def without_mode(function: Any) -> Any:
    @functools.wraps(function)
    def without_mode(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    setattr(without_mode, _MARK, True)
    return without_mode


_MOVES = (
    *("all_gather", "all_gather_into_tensor", "all_gather_single", "_all_gather_base", "all_to_all"),
    *("all_to_all_single", "broadcast", "gather", "scatter", "send", "recv", "isend", "irecv"),
)
_GATHERS = ("all_gather_into_tensor", "all_gather_single", "_all_gather_base")
_SCATTERS = ("reduce_scatter_tensor", "reduce_scatter_single", "_reduce_scatter_base")
_REDUCTIONS = ("all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", *_SCATTERS)
_WRAPPED = (
    (("init_process_group", "new_group"), _with_gloo),
    (("barrier",), _checking_device_ids),
    (("_coalescing_manager",), _without_device),
    (_GATHERS, _gathering_as_nccl),
    (_SCATTERS, _scattering_as_nccl),
    (_REDUCTIONS, _reducing_as_nccl),
    (_MOVES, _moving_booleans),
)
