"""`smddp` as torch's own process group, per device: NCCL for CUDA tensors, a communication engine for CPU tensors.

torch's group passes each collective to an operator `c10d::…`. Its kernel for the tensors' device asks the group for
that device's backend. On CUDA that is torch's own ProcessGroupNCCL, and no Python of this library runs. A CPU backend
cannot be written in Python (`Backend` has no constructor there), but a CPU kernel can. It checks whether the group has
a communication engine, and passes the collectives of all other groups to their own backend, as torch's kernel does. See
docs/decisions/nccl-by-device.md.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from smdistributed.core.exceptions import SMDDPError
from smdistributed.core.torch.process_group import ProcessGroup
from smdistributed.core.torch.untraced import without_dynamo

_METHODS: dict[str, tuple[str, str]] = {
    "allreduce_": ("allreduce", "AllreduceOptions"),
    "allreduce_coalesced_": ("allreduce_coalesced", "AllreduceCoalescedOptions"),
    "broadcast_": ("broadcast", "BroadcastOptions"),
    "reduce_": ("reduce", "ReduceOptions"),
    "allgather_": ("allgather", "AllgatherOptions"),
    "_allgather_base_": ("_allgather_base", "AllgatherOptions"),
    "allgather_coalesced_": ("allgather_coalesced", "AllgatherOptions"),
    "allgather_into_tensor_coalesced_": ("allgather_into_tensor_coalesced", "AllgatherOptions"),
    "gather_": ("gather", "GatherOptions"),
    "scatter_": ("scatter", "ScatterOptions"),
    "reduce_scatter_": ("reduce_scatter", "ReduceScatterOptions"),
    "_reduce_scatter_base_": ("_reduce_scatter_base", "ReduceScatterOptions"),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter_tensor_coalesced", "ReduceScatterOptions"),
    "alltoall_": ("alltoall", "AllToAllOptions"),
    "alltoall_base_": ("alltoall_base", "AllToAllOptions"),
    "barrier": ("barrier", "BarrierOptions"),
}
"""torch's operators, a backend's methods that do the same, and their options. gloo carries messages, as elsewhere."""
_ONE_OF = {
    "allgather_into_tensor_coalesced": "_allgather_base",
    "reduce_scatter_tensor_coalesced": "_reduce_scatter_base",
}
"""Methods for several tensors that a backend lacks in Python, and those for one."""
_FIELDS = {
    "reduce_op": "reduceOp",
    "root_rank": "rootRank",
    "root_tensor": "rootTensor",
    "device_ids": "device_ids",
    "async_op": "asyncOp",
    "timeout": "timeout",
}
"""The arguments of an operator that torch's options hold, and their names there."""
_NO_TENSORS = {"process_group", "sparse_indices", *_FIELDS}
_KEYS = ("CPU", "SparseCPU")

_engines: WeakKeyDictionary[Any, ProcessGroup] = WeakKeyDictionary()
_library: Any = None  # holds the kernels, which end with it


class _Options(NamedTuple):
    """The fields of torch's options that `ProcessGroup` reads, under torch's names."""

    reduceOp: Any  # noqa: N815
    rootRank: int  # noqa: N815
    asyncOp: bool | None  # noqa: N815


def is_supported() -> bool:
    """Whether a kernel in Python can find its group and return a handle: torch 2.9 or later, which has get_kernel."""
    return hasattr(dist.ProcessGroup, "unbox") and hasattr(dist.Work, "boxed") and hasattr(torch.library, "get_kernel")


def attach_engine(group: dist.ProcessGroup, engine: ProcessGroup) -> None:
    """Lets `engine` carry a torch group's CPU tensors. The first call replaces torch's kernels in this process."""
    _install_kernels()
    _engines[group] = engine


def has_kernels() -> bool:
    """Whether this process has a group of torch's own with a communication engine, or had one."""
    return _library is not None


def engine_of(group: object) -> ProcessGroup | None:
    """Returns the process group that carries a group's CPU tensors; None: the group is not of `smddp`."""
    if isinstance(group, ProcessGroup):
        return group
    return _engines.get(group) if isinstance(group, dist.ProcessGroup) else None


def _install_kernels() -> None:
    """Replaces torch's kernels of collectives for CPU tensors, dense and sparse, once in a process."""
    global _library
    if has_kernels():
        return
    _library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():  # torch warns that a kernel is replaced, which is intended
        warnings.simplefilter("ignore", UserWarning)
        for operator, (method, options) in _METHODS.items():
            kernel = _kernel(operator, method, getattr(dist.distributed_c10d, options))
            for key in _KEYS:
                if torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{operator}", key):
                    _library.impl(operator, kernel, key)


def _kernel(operator: str, method: str, options: type) -> Callable[..., Any]:
    """Returns a kernel that runs `ProcessGroup`, or other groups' own backend. Missing arguments get defaults."""
    schema = torch._C._get_schema(f"c10d::{operator}", "")
    names = [argument.name for argument in schema.arguments]
    defaults = tuple(argument.default_value for argument in schema.arguments)  # None if there is none
    place, gives_tensors = names.index("process_group"), len(schema.returns) == 2
    passed = [] if operator == "barrier" else [at for at, name in enumerate(names) if name not in _NO_TENSORS]
    run = inspect.unwrap(getattr(ProcessGroup, method))  # this kernel keeps Dynamo out already

    def collective(*arguments: Any) -> Any:
        given = arguments + defaults[len(arguments) :]
        named = dict(zip(names, given))
        tensors = [given[at] for at in passed]
        group = dist.ProcessGroup.unbox(arguments[place])
        engine = _engines.get(group)
        if engine is None:
            work = _run_on_backend(group, method, tensors, _torchs_options(options(), named))
        else:
            work = run(engine, *tensors, _our_options(named))
        return (arguments[0], work.boxed()) if gives_tensors else work.boxed()

    return without_dynamo(collective)


def _our_options(named: dict[str, Any]) -> _Options:
    return _Options(
        reduceOp=_reduction(named["reduce_op"]) if "reduce_op" in named else None,
        rootRank=named.get("root_rank", -1),
        asyncOp=None if named["async_op"] else False,  # None: only C++ may hold the handle
    )


def _torchs_options(options: Any, named: dict[str, Any]) -> Any:
    for name, field in _FIELDS.items():
        if name not in named or not hasattr(options, field):
            continue
        value = named[name]
        if name == "reduce_op":
            value = dist.ReduceOp(_reduction(value))
        elif name == "timeout":
            value = timedelta(milliseconds=value)
        setattr(options, field, value)
    return options


def _run_on_backend(group: Any, method: str, tensors: Sequence[Any], options: Any) -> Any:
    """Runs a collective on a group's own backend for CPU tensors, as torch's kernel does, and returns its handle.

    torch's kernel (`get_kernel`) would hold the GIL. A thread of gloo waits for it with a lock that the kernel needs.
    """
    backend = group._get_backend(torch.device("cpu"))
    if hasattr(backend, method):
        return getattr(backend, method)(*tensors, options)
    works = [getattr(backend, _ONE_OF[method])(*pair, options) for pair in zip(*tensors)]
    for work in works[:-1]:  # C++ would not keep a handle in Python alive that waits for all of them
        work.wait()
    return works[-1]


def _reduction(boxed: Any) -> Any:
    """Returns the kind of a reduction that torch passes to a kernel. Raises SMDDPError for a premultiplied sum."""
    kind = _REDUCTIONS[int(boxed.op())]
    if kind == dist.ReduceOp.PREMUL_SUM:  # the factor is not accessible here
        raise SMDDPError(
            "If NCCL carries the CUDA tensors of a group of smddp, no group has a premultiplied sum of CPU tensors. "
            "Fix: multiply the tensor first, and reduce it with ReduceOp.SUM."
        )
    return kind


_REDUCTIONS: dict[int, Any] = {kind.value: kind for kind in dist.ReduceOp.RedOpType.__members__.values()}
