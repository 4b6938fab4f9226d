"""`smddp` as torch's own process group, per device: NCCL for CUDA tensors, a communication engine for CPU tensors.

torch's group passes each collective to an operator `c10d::…`. Its kernel for the tensors' device asks the group for
that device's backend. On CUDA that is torch's own ProcessGroupNCCL, and no Python of this library runs. A CPU backend
cannot be written in Python (`Backend` has no constructor there), but a CPU kernel can. It checks whether the group has
a communication engine, and leaves all other groups to torch's kernel. See docs/decisions/nccl-by-device.md.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from smdistributed.core.exceptions import SMDDPError
from smdistributed.core.torch.process_group import ProcessGroup
from smdistributed.core.torch.untraced import without_dynamo

_METHODS = {
    "allreduce_": "allreduce",
    "allreduce_coalesced_": "allreduce_coalesced",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "allgather_": "allgather",
    "_allgather_base_": "_allgather_base",
    "allgather_coalesced_": "allgather_coalesced",
    "allgather_into_tensor_coalesced_": "allgather_into_tensor_coalesced",
    "gather_": "gather",
    "scatter_": "scatter",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter_tensor_coalesced",
    "alltoall_": "alltoall",
    "alltoall_base_": "alltoall_base",
    "barrier": "barrier",
}
"""torch's operators, and the methods of `ProcessGroup` that do the same. gloo carries messages, as elsewhere."""
_NO_TENSORS = {"process_group", "reduce_op", "root_rank", "root_tensor", "sparse_indices", "async_op", "timeout"}
_IN_OPTIONS = ("reduce_op", "root_rank", "async_op")
_KEYS = ("CPU", "SparseCPU")

_engines: WeakKeyDictionary[Any, ProcessGroup] = WeakKeyDictionary()
_library: Any = None  # holds the kernels, which end with it


class _Options(NamedTuple):
    """The fields of torch's options that `ProcessGroup` reads, under torch's names."""

    reduceOp: Any  # noqa: N815
    rootRank: int  # noqa: N815
    asyncOp: bool | None  # noqa: N815


def is_supported() -> bool:
    """Whether a Python kernel can find its process group and call the kernel that it replaces (torch 2.10 or later)."""
    return hasattr(dist.ProcessGroup, "unbox") and hasattr(dist.Work, "boxed") and hasattr(torch.library, "get_kernel")


def attach_engine(group: dist.ProcessGroup, engine: ProcessGroup) -> None:
    """Lets `engine` carry the CPU tensors of a group of torch's own, for the group's lifetime.

    The first call replaces torch's kernels for CPU tensors in this process.
    """
    _install_kernels()
    _engines[group] = engine


def engine_of(group: object) -> ProcessGroup | None:
    """Returns the process group that carries a group's CPU tensors; None: the group is not of `smddp`."""
    if isinstance(group, ProcessGroup):
        return group
    return _engines.get(group) if isinstance(group, dist.ProcessGroup) else None


def _install_kernels() -> None:
    """Replaces torch's kernels of collectives for CPU tensors, dense and sparse, once in a process.

    Groups that are not in `_engines` keep torch's own.
    """
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():  # torch warns that a kernel is replaced, which is intended
        warnings.simplefilter("ignore", UserWarning)
        for operator, method in _METHODS.items():
            for key in _KEYS:
                if torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{operator}", key):
                    _library.impl(operator, _kernel(operator, method, key), key, with_keyset=True)


def _kernel(operator: str, method: str, key: str) -> Callable[..., Any]:
    """Returns the kernel of an operator: the method of `ProcessGroup`, or torch's own for other groups.

    Arguments that a call leaves out get the operator's defaults. A premultiplied sum raises SMDDPError.
    """
    torchs = torch.library.get_kernel(f"c10d::{operator}", key)
    schema = torch._C._get_schema(f"c10d::{operator}", "")
    names = [argument.name for argument in schema.arguments]
    defaults = tuple(argument.default_value for argument in schema.arguments)  # None if there is none
    place, gives_tensors = names.index("process_group"), len(schema.returns) == 2
    passed = [] if operator == "barrier" else [at for at, name in enumerate(names) if name not in _NO_TENSORS]
    reduction, root, is_async = (names.index(name) if name in names else None for name in _IN_OPTIONS)
    run = inspect.unwrap(getattr(ProcessGroup, method))  # this kernel keeps Dynamo out already

    def collective(keys: Any, *arguments: Any) -> Any:
        engine = _engines.get(dist.ProcessGroup.unbox(arguments[place]))
        if engine is None:
            return torchs.call_boxed(keys, *arguments)
        given = arguments + defaults[len(arguments) :]
        options = _Options(
            reduceOp=None if reduction is None else _reduction(given[reduction]),
            rootRank=-1 if root is None else given[root],
            asyncOp=None if is_async is None or given[is_async] else False,  # None: only C++ may hold the handle
        )
        work = run(engine, *[given[at] for at in passed], options).boxed()
        return (arguments[0], work) if gives_tensors else work

    return without_dynamo(collective)


def _reduction(boxed: Any) -> Any:
    """Returns the kind of a reduction that torch passes to a kernel. Raises SMDDPError for a premultiplied sum."""
    kind = _REDUCTIONS[int(boxed.op())]
    if kind == dist.ReduceOp.PREMUL_SUM:  # the factor is not accessible here
        raise SMDDPError(
            "The backend smddp has no premultiplied sum of CPU tensors if NCCL carries the group's CUDA tensors. "
            "Fix: multiply the tensor first, and reduce it with ReduceOp.SUM."
        )
    return kind


_REDUCTIONS: dict[int, Any] = {kind.value: kind for kind in dist.ReduceOp.RedOpType.__members__.values()}
