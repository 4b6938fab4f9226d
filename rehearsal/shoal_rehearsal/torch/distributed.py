"""torch.distributed: NCCL is answered by gloo; other backends are as they are, and see CPU tensors."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
import torch.distributed as dist

from shoal_rehearsal.torch import devices
from shoal_rehearsal.torch.places import common_place, put

_UNSEEN = "_shoal_without_mode"
_MOVING = (
    *("all_gather", "all_gather_into_tensor", "all_gather_single", "_all_gather_base", "all_to_all"),
    *("all_to_all_single", "broadcast", "gather", "scatter", "send", "recv", "isend", "irecv"),
)


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
    for name in ("all_gather_into_tensor", "all_gather_single", "_all_gather_base"):
        _replace(name, _gathering_flat)
    for name in ("reduce_scatter_tensor", "reduce_scatter_single", "_reduce_scatter_base"):
        _replace(name, _scattering_flat)
    for name in _MOVING:
        _replace(name, _as_bytes)
    bucket: Any = torch._C._distributed_c10d.GradBucket
    for name in ("buffer", "gradients"):
        setattr(bucket, name, _where_the_parameters_are(getattr(bucket, name)))


def _where_the_parameters_are(method: Any) -> Any:
    """DistributedDataParallel makes the tensors of a communication hook in C++, where their device is not seen."""

    @functools.wraps(method)
    def tensors(bucket: Any) -> Any:
        made = method(bucket)
        put(made, common_place(bucket.parameters()))
        return made

    return tensors


def _as_bytes(function: Any) -> Any:
    """NCCL moves booleans as bytes; gloo refuses them."""

    @functools.wraps(function)
    def moving(*args: Any, **kwargs: Any) -> Any:
        return function(*map(_bytes, args), **{name: _bytes(value) for name, value in kwargs.items()})

    return moving


def _bytes(value: Any) -> Any:
    """Booleans, and those in a list, as bytes in the same memory."""
    if isinstance(value, list):
        return [_bytes(each) for each in value]
    return value.view(torch.uint8) if isinstance(value, torch.Tensor) and value.dtype == torch.bool else value


def _replace(name: str, wrap: Any) -> None:
    original = getattr(dist, name, None)
    if original is None:  # another version's name
        return
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
            options["backend"] = _answering(backend)
        if options.pop("device_id", None) is not None:  # tells NCCL to connect at once
            devices.cuda(kwargs.get("device_id"))
        if "nccl" in str(backend).lower():
            options.pop("pg_options", None)
        return function(**options)

    return with_gloo


def _answering(backend: str) -> str:
    """The backend that answers for one, or for several by device: that of CUDA, as all tensors lie in one memory."""
    wanted = backend.lower()
    by_device = dict(pair.split(":", 1) for pair in wanted.split(",") if ":" in pair)
    if not by_device:
        return "gloo" if "nccl" in wanted else backend
    found = by_device.get("cuda", "nccl")
    return by_device.get("cpu", "gloo") if found == "nccl" else found


def _without_device_ids(function: Any) -> Any:
    @functools.wraps(function)
    def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        for ordinal in device_ids or ():
            devices.checked(ordinal)
        return function(group, async_op)

    return barrier


def _averaging(function: Any) -> Any:
    """NCCL averages, and takes the sum of booleans for their maximum; gloo does neither."""

    @functools.wraps(function)
    def all_reduce(tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if tensor.dtype == torch.bool and dist.get_backend(group) == "gloo":
            tensor, op = _bytes(tensor), dist.ReduceOp.MAX if op == dist.ReduceOp.SUM else op
        if op != dist.ReduceOp.AVG or dist.get_backend(group) != "gloo":
            return function(tensor, op, group, async_op)
        function(tensor, dist.ReduceOp.SUM, group)
        tensor.div_(dist.get_world_size(group))
        return _Done() if async_op else None

    return all_reduce


def _gathering_flat(function: Any) -> Any:
    """NCCL compares the numbers of elements alone; gloo compares shapes, and in torch 2.0 has no such collective."""

    @functools.wraps(function)
    def gather(output_tensor: Any, input_tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        if not _is_flattened(group, output_tensor, input_tensor):
            return function(output_tensor, input_tensor, group, async_op)
        flat, given = output_tensor.view(-1), input_tensor.view(-1)
        if _HAS_SINGLE:
            return function(flat, given, group, async_op)
        return dist.all_gather(list(flat.chunk(dist.get_world_size(group))), given, group, async_op)

    return gather


def _scattering_flat(function: Any) -> Any:
    """As above; NCCL averages, too."""

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
        flat, given = output.view(-1), input.view(-1)
        if _HAS_SINGLE and op != dist.ReduceOp.AVG:
            return function(flat, given, op, group, async_op)
        total = given.clone()
        dist.all_reduce(total, op, group)
        flat.copy_(total.chunk(dist.get_world_size(group))[dist.get_rank(group)])
        return _Done() if async_op else None

    return scatter


_HAS_SINGLE = hasattr(dist, "_coalescing_manager")  # torch 2.1 and later


def _is_flattened(group: Any, output: Any, given: Any) -> bool:
    """Whether gloo answers, and the numbers of elements are such that NCCL would take the tensors."""
    if dist.get_backend(group) != "gloo" or not (output.is_contiguous() and given.is_contiguous()):
        return False
    size = dist.get_world_size(group)
    return bool(output.numel() == size * given.numel() or given.numel() == size * output.numel())


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
            if inspect.isfunction(method) and not name.startswith("__") and not hasattr(method, _UNSEEN):
                setattr(type(group), name, _unseen(method))
        return group

    return create_unseen


def _unseen(function: Any) -> Any:
    @functools.wraps(function)
    def without_mode(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    setattr(without_mode, _UNSEEN, True)
    return without_mode
