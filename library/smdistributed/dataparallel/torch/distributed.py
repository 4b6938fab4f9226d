"""The first-generation collectives, usually imported `as dist` (AWS developer guide, 1.x).

They use torch.distributed with the backend `smddp`, which `init_process_group` initializes. Other libraries in the
process may use it directly, as published scripts expect. Collectives raise the backend's SMDDPError if a rank has
ended, is late or calls another collective.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
import torch.distributed
from torch.distributed import ProcessGroup, Work

from smdistributed.core.launch import read_launch
from smdistributed.core.torch.engine_selection import open_store
from smdistributed.dataparallel.exceptions import SMDDPError
from smdistributed.dataparallel.reduce_op import ReduceOp
from smdistributed.dataparallel.torch.torch_smddp import BACKEND

__all__ = [
    "ReduceOp",
    "all_gather",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "group",
    "init_process_group",
    "is_available",
    "is_initialized",
    "reduce",
]

_TORCH_OPS = {
    ReduceOp.AVERAGE: torch.distributed.ReduceOp.AVG,
    ReduceOp.SUM: torch.distributed.ReduceOp.SUM,
    ReduceOp.MIN: torch.distributed.ReduceOp.MIN,
    ReduceOp.MAX: torch.distributed.ReduceOp.MAX,
}
_DEPRECATED = (
    "smdistributed.dataparallel.torch.distributed is the deprecated first generation: import "
    "smdistributed.dataparallel.torch.torch_smddp and call torch.distributed.init_process_group(backend='smddp')."
)


class group:  # noqa: N801 (the published name)
    """The ranks that take part: WORLD for all of them, or a process group of torch.distributed."""

    WORLD: ProcessGroup | None = None


def is_available() -> bool:
    """Returns whether a launcher started this process as a rank of a job (AWS developer guide).

    Raises:
        LaunchError: If the launch environment is incomplete, invalid or contradicts itself.
    """
    return read_launch().launched


def init_process_group(*args: object, **kwargs: object) -> None:
    """Joins this process's job, and makes the CUDA device with the number of the local rank current if there is one.

    Does nothing if torch.distributed is initialized already. A process that no launcher started becomes a job of one
    rank. Rank 0 warns that this generation is deprecated: AWS has deprecated it in version 1.4 (AWS release notes).

    Args:
        args: Ignored: published scripts pass `backend="smddp"` or nothing.
        kwargs: Ignored.

    Raises:
        LaunchError: If the launch environment is incomplete or contradicts itself (`smdistributed.core.launch`).
    """
    if is_initialized():
        return
    launch = read_launch()
    store = open_store(launch)
    if launch.rank == 0:
        warnings.warn(_DEPRECATED, DeprecationWarning, stacklevel=2)
    torch.distributed.init_process_group(BACKEND, store=store, rank=launch.rank, world_size=launch.world_size)


def is_initialized() -> bool:
    """Returns whether this process has joined its job."""
    return torch.distributed.is_initialized()


def get_world_size(group: ProcessGroup | None = group.WORLD) -> int:
    """Returns the number of ranks.

    Args:
        group: The ranks that take part; default: all.

    Raises:
        SMDDPError: Before `init_process_group`.
    """
    require_init()
    return torch.distributed.get_world_size(group)


def get_rank(group: ProcessGroup | None = group.WORLD) -> int:
    """Returns this process's rank among all, from 0; not the host's number, as the guide says (published scripts).

    Args:
        group: The ranks that take part; default: all.

    Raises:
        SMDDPError: Before `init_process_group`.
    """
    require_init()
    return torch.distributed.get_rank(group)


def get_local_rank() -> int:
    """Returns this process's local rank: from 0, among the ranks of its host.

    Raises:
        SMDDPError: Before `init_process_group`.
    """
    require_init()
    return read_launch().local_rank


def all_reduce(
    tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = group.WORLD,
    async_op: bool = False,
) -> Work | None:
    """Combines a tensor over the ranks, in place; all ranks get bitwise the same result (AWS developer guide).

    Args:
        tensor: Any shape and strides, the same shape and dtype on all ranks.
        op: AVERAGE is the sum divided by the number of ranks, for floating-point and complex dtypes.
        group: The ranks that take part; default: all.
        async_op: Whether to return at once with a handle.

    Returns:
        A handle if `async_op`; the result is there after its `wait()`. Otherwise None.

    Raises:
        SMDDPError: Before `init_process_group`, or if a rank has ended, is late or calls another collective.
        TypeError: For AVERAGE of integers, or an `op` of another library.
    """
    require_init()
    work: Work | None = torch.distributed.all_reduce(tensor, _torch_op(op, tensor), group, async_op)
    return work


def reduce(tensor: torch.Tensor, dst: int = 0) -> None:
    """Sums a tensor over the ranks into the tensor of rank `dst`; other ranks keep theirs (published scripts).

    Args:
        tensor: Any shape and strides, the same shape and dtype on all ranks.
        dst: The rank that gets the sum.

    Raises:
        SMDDPError: Before `init_process_group`, or if a rank has ended, is late or calls another collective.
    """
    require_init()
    torch.distributed.reduce(tensor, dst)


def broadcast(
    tensor: torch.Tensor, src: int = 0, group: ProcessGroup | None = group.WORLD, async_op: bool = False
) -> Work | None:
    """Copies rank `src`'s tensor into every rank's, in place (AWS developer guide).

    Args:
        tensor: Any shape, strides and dtype, the same shape and dtype on all ranks.
        src: The rank that sends.
        group, async_op: As for `all_reduce`, which also tells the errors.

    Returns:
        As `all_reduce`.
    """
    require_init()
    work: Work | None = torch.distributed.broadcast(tensor, src, group, async_op)
    return work


def all_gather(
    tensor_list: list[torch.Tensor],
    tensor: torch.Tensor,
    group: ProcessGroup | None = group.WORLD,
    async_op: bool = False,
) -> Work | None:
    """Gathers `tensor` from every rank into `tensor_list`, in rank order.

    Args:
        tensor_list: One tensor for each rank, with the shape and dtype of `tensor`.
        tensor: Any shape, strides and dtype, the same shape and dtype on all ranks.
        group, async_op: As for `all_reduce`, which also tells the errors.

    Returns:
        As `all_reduce`.
    """
    require_init()
    work: Work | None = torch.distributed.all_gather(tensor_list, tensor, group, async_op)
    return work


def all_to_all_single(
    output_t: torch.Tensor,
    input_t: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: ProcessGroup | None = group.WORLD,
    async_op: bool = False,
) -> Work | None:
    """Splits `input_t` along its first dimension, sends each rank its part, and joins the received parts in `output_t`.

    Args:
        output_t: Gets the rows of all ranks, in rank order.
        input_t: The rows to send, of the same dtype.
        output_split_sizes: Number of rows from each rank; None: equally many.
        input_split_sizes: Number of rows for each rank; None: equally many.
        group, async_op: As for `all_reduce`.

    Returns:
        As `all_reduce`.

    Raises:
        SMDDPError: As `all_reduce`, and if a rank sends another number of rows than the receiver expects.
    """
    require_init()
    work: Work | None = torch.distributed.all_to_all_single(
        output_t, input_t, output_split_sizes, input_split_sizes, group, async_op
    )
    return work


def barrier(group: ProcessGroup | None = group.WORLD, async_op: bool = False) -> Work | None:
    """Blocks until every rank has called it (AWS developer guide).

    Args:
        group, async_op: As for `all_reduce`, which also tells the errors.

    Returns:
        As `all_reduce`.
    """
    require_init()
    work: Work | None = torch.distributed.barrier(group, async_op)
    return work


def require_init() -> None:
    """Raises SMDDPError before `init_process_group`."""
    if not is_initialized():
        raise SMDDPError("This process has not joined its job. Fix: call init_process_group() first.")


def _torch_op(op: ReduceOp, tensor: torch.Tensor) -> torch.distributed.ReduceOp.RedOpType:
    if not isinstance(op, ReduceOp):
        raise TypeError(
            f"op={op!r} is not a reduction of this library. Fix: use one of {', '.join(map(str, ReduceOp))}."
        )
    if op is ReduceOp.AVERAGE and not (tensor.is_floating_point() or tensor.is_complex()):
        raise TypeError(
            f"{op} needs a floating-point tensor, not {tensor.dtype}. Fix: use ReduceOp.SUM, or convert it first."
        )
    return _TORCH_OPS[op]
