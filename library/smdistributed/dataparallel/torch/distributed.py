"""The first-generation collectives, customarily imported `as dist` (AWS developer guide, 1.x).

Underneath is torch.distributed with the backend `smddp`, which `init_process_group` initialises: other libraries in the
process may use it directly (published scripts rely on that). What the backend raises passes through: SMDDPError when a
rank is gone, does not come in time, or calls another collective.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch
import torch.distributed

from smdistributed.core.launch import read_launch
from smdistributed.core.torch.rendezvous import open_store
from smdistributed.dataparallel.exceptions import SMDDPError
from smdistributed.dataparallel.reduce_op import ReduceOp
from smdistributed.dataparallel.torch.torch_smddp import BACKEND

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup, Work

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
    """Which ranks take part: WORLD, all of them, or a process group of torch.distributed."""

    WORLD: ProcessGroup | None = None


def is_available() -> bool:
    """True when a launcher started this process as a rank of a job (AWS developer guide).

    Raises LaunchError as `init_process_group` does.
    """
    return read_launch().launched


def init_process_group(*args: object, **kwargs: object) -> None:
    """Join this process's job, and make the CUDA device numbered like the local rank current, where there is one.

    All arguments are ignored: callers pass `backend="smddp"` or nothing (published scripts). Does nothing when
    torch.distributed is initialised already. A process that no launcher started becomes a job of one rank.

    Rank 0 warns that this generation is deprecated, as AWS's does from 1.4 on.

    Raises LaunchError (`smdistributed.core.launch`) when the environment is incomplete or contradicts itself.
    """
    if is_initialized():
        return
    launch = read_launch()
    store = open_store(launch)
    if launch.rank == 0:
        warnings.warn(_DEPRECATED, DeprecationWarning, stacklevel=2)
    torch.distributed.init_process_group(BACKEND, store=store, rank=launch.rank, world_size=launch.world_size)


def is_initialized() -> bool:
    """True once this process has joined its job."""
    return torch.distributed.is_initialized()


def get_world_size(group: ProcessGroup | None = group.WORLD) -> int:
    """The number of ranks. Raises SMDDPError before `init_process_group`."""
    require_init()
    return torch.distributed.get_world_size(group)


def get_rank(group: ProcessGroup | None = group.WORLD) -> int:
    """This process's rank among all, from 0; not the node's rank, whatever the guide says (published scripts).

    Raises SMDDPError before `init_process_group`.
    """
    require_init()
    return torch.distributed.get_rank(group)


def get_local_rank() -> int:
    """This process's rank among those of its host, from 0. Raises SMDDPError before `init_process_group`."""
    require_init()
    return read_launch().local_rank


def all_reduce(
    tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = group.WORLD,
    async_op: bool = False,
) -> Work | None:
    """Combine `tensor` over the ranks, in place: same shape and dtype on all, bitwise the same result on all.

    So says the AWS developer guide. AVERAGE is the sum divided by the number of ranks; it raises TypeError for
    integers, whose average is none. Returns a work handle when `async_op` (the result is there after its `wait()`),
    else None. Raises SMDDPError before `init_process_group`.
    """
    require_init()
    work: Work | None = torch.distributed.all_reduce(tensor, _torch_op(op, tensor), group, async_op)
    return work


def reduce(tensor: torch.Tensor, dst: int = 0) -> None:
    """Sum `tensor` over the ranks into rank `dst`'s; the others keep theirs (published scripts).

    Raises SMDDPError before `init_process_group`.
    """
    require_init()
    torch.distributed.reduce(tensor, dst)


def broadcast(
    tensor: torch.Tensor, src: int = 0, group: ProcessGroup | None = group.WORLD, async_op: bool = False
) -> Work | None:
    """Copy rank `src`'s `tensor` into that of every rank, in place: same shape, and any dtype, on all (AWS guide).

    Returns a work handle when `async_op`, else None. Raises SMDDPError before `init_process_group`.
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
    """Copy every rank's `tensor` into that of `tensor_list` which has its number; all of the same shape and dtype.

    Returns a work handle when `async_op`, else None. Raises SMDDPError before `init_process_group`.
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
    """Cut `input_t` along its first dimension, give each rank its part, and join what all give in `output_t`.

    output_split_sizes, input_split_sizes: rows from and for each rank; None: all the same.

    Returns a work handle when `async_op`, else None. Raises SMDDPError before `init_process_group`, and when a rank
    gives another number of rows than the one that gets them expects.
    """
    require_init()
    work: Work | None = torch.distributed.all_to_all_single(
        output_t, input_t, output_split_sizes, input_split_sizes, group, async_op
    )
    return work


def barrier(group: ProcessGroup | None = group.WORLD, async_op: bool = False) -> Work | None:
    """Wait until every rank is here (AWS developer guide).

    Returns a work handle when `async_op`, else None. Raises SMDDPError before `init_process_group`.
    """
    require_init()
    work: Work | None = torch.distributed.barrier(group, async_op)
    return work


def require_init() -> None:
    """Raise SMDDPError before `init_process_group`."""
    if not is_initialized():
        raise SMDDPError("This process has not joined its job: call init_process_group() first.")


def _torch_op(op: ReduceOp, tensor: torch.Tensor) -> torch.distributed.ReduceOp.RedOpType:
    if not isinstance(op, ReduceOp):
        raise TypeError(f"op={op!r} is not a reduction of this library: use one of {', '.join(map(str, ReduceOp))}.")
    if op is ReduceOp.AVERAGE and not (tensor.is_floating_point() or tensor.is_complex()):
        raise TypeError(
            f"{op} needs a floating-point tensor, not {tensor.dtype}: use ReduceOp.SUM, or convert it first."
        )
    return _TORCH_OPS[op]
