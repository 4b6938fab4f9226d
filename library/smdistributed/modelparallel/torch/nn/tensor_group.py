"""The ranks that share tensors (TP_GROUP), and operations on tensors over them that autograd knows.

Each operation is torch.distributed's own, on the device of its tensor, so that one path serves CPUs and GPUs. The
gradient of each is another operation of this module. On the meta device nothing is sent: shapes are right, for a trace.

Rows are the first axis: the batch. With `prescaled_batch` all ranks of the group have the same rows, and without it
each rank has rows of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Function

from smdistributed.core.torch.devices import device_of
from smdistributed.modelparallel.backend.exceptions import StepUsageError


@dataclass(frozen=True)
class TensorGroup:
    """The ranks that share tensors with this one. `same_rows`: whether all have the same rows (`prescaled_batch`)."""

    group: Any
    rank: int
    size: int
    same_rows: bool
    seed: int = 0
    """`tensor_parallel_seed`."""


_current: TensorGroup | None = None
# Their names since torch 2.13 come first: the others warn there.
_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def set_tensor_group(group: TensorGroup | None) -> None:
    """Makes this the group of the process; `smp.init` calls it."""
    global _current
    _current = group


def tensor_group() -> TensorGroup:
    """The group of this process. Raises StepUsageError before `smp.init`."""
    if _current is None:
        raise StepUsageError("smp.init() has not been called. Fix: call it first, on every rank.")
    return _current


def seed_of_first() -> int:
    """Returns torch's seed on the first rank of the group, which all call.

    The communication engine takes it there: a message of the transport may wait until its thread looks again.
    """
    group, seed = tensor_group().group, torch.initial_seed()
    sent = torch.tensor(seed - (seed >> 63 << 64), device=device_of(group))  # int64
    dist.broadcast(sent, dist.get_global_rank(group, 0), group=group)
    return int(sent.item()) % (1 << 64)


# --- between rows of this rank and work that all ranks share


def share_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the rows of all ranks: the input of a layer with split output channels."""
    return _apply(tensor, (_copy, _sum), (_gather, _sum_rows))


def sum_partial(tensor: torch.Tensor) -> torch.Tensor:
    """Sums the ranks' results for the rows of all, and returns the rows of this rank."""
    return _apply(tensor, (_sum, _copy), (_sum_rows, _gather))


def sum_over_group(tensor: torch.Tensor) -> torch.Tensor:
    """Sums the ranks' results for the same rows. Each rank computes other results from the sum."""
    return _apply(_apply(tensor, (_sum, _copy), (_sum, _copy)), (_copy, _sum), (_copy, _sum))


def rows_to_channels(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of the channels (the last axis) for the rows of all ranks."""
    return _apply(tensor, (_take_channels, _gather_channels), (_to_channels, _to_rows))


def channels_to_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Returns all channels for the rows of this rank. The inverse of `rows_to_channels`."""
    return _apply(tensor, (_gather_channels, _take_channels), (_to_rows, _to_channels))


def gather_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the rows of all ranks of a tensor without a gradient, such as token numbers or a mask."""
    own = tensor_group()
    return tensor if own.size == 1 or own.same_rows else _gather(tensor.detach())


# --- gradients: each operation has an opposite one

_Operation = Callable[[torch.Tensor], torch.Tensor]
_Pair = tuple[_Operation, _Operation]
"""An operation, and the operation for its gradient."""


def _apply(tensor: torch.Tensor, same: _Pair, own: _Pair) -> torch.Tensor:
    """Applies the operation for ranks that have the same rows, or for ranks with rows of their own."""
    group = tensor_group()
    if group.size == 1:
        return tensor
    return _Paired.apply(same if group.same_rows else own, tensor)  # type: ignore[no-any-return,no-untyped-call]


class _Paired(Function):
    @staticmethod
    def forward(ctx: Any, pair: _Pair, tensor: torch.Tensor) -> torch.Tensor:
        ctx.opposite = pair[::-1]
        return pair[0](tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, _Paired.apply(ctx.opposite, gradient)  # type: ignore[no-untyped-call]


# --- without autograd


def own_part(tensor: torch.Tensor, axis: int) -> torch.Tensor:
    """Returns a contiguous copy of this rank's part along an axis; on the meta device a view."""
    own = tensor_group()
    part = tensor.tensor_split(own.size, axis)[own.rank]
    return part if tensor.is_meta else part.clone(memory_format=torch.contiguous_format)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view_as(tensor)


def _take_channels(tensor: torch.Tensor) -> torch.Tensor:
    return own_part(tensor, -1)


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    result = tensor.clone(memory_format=torch.contiguous_format)
    if not tensor.is_meta:
        dist.all_reduce(result, group=tensor_group().group)
    return result


def _gather(tensor: torch.Tensor) -> torch.Tensor:
    own = tensor_group()
    rows = tensor.contiguous()
    result = rows.new_empty((own.size * rows.shape[0], *rows.shape[1:]))
    if not tensor.is_meta:
        _all_gather(result, rows, group=own.group)
    return result


def _sum_rows(tensor: torch.Tensor) -> torch.Tensor:
    own = tensor_group()
    rows = tensor.contiguous()
    result = rows.new_empty((rows.shape[0] // own.size, *rows.shape[1:]))
    if not tensor.is_meta:
        _reduce_scatter(result, rows, group=own.group)
    return result


def _to_channels(tensor: torch.Tensor) -> torch.Tensor:
    """[rows, ..., channels] of each rank becomes [rows of all, ..., channels / size]."""
    own = tensor_group()
    parts = torch.stack(tensor.tensor_split(own.size, -1))
    return _exchange(parts).flatten(0, 1)


def _to_rows(tensor: torch.Tensor) -> torch.Tensor:
    """[rows of all, ..., channels / size] of each rank becomes [rows, ..., channels]."""
    own = tensor_group()
    parts = tensor.contiguous().view(own.size, tensor.shape[0] // own.size, *tensor.shape[1:])
    return torch.cat(_exchange(parts).unbind(), -1)


def _exchange(parts: torch.Tensor) -> torch.Tensor:
    """Sends part i to rank i, and returns the parts that come from the ranks, in their order."""
    result = torch.empty_like(parts)
    if not parts.is_meta:
        dist.all_to_all_single(result, parts, group=tensor_group().group)
    return result


def _gather_channels(tensor: torch.Tensor) -> torch.Tensor:
    own = tensor_group()
    return torch.cat(_gather(tensor.unsqueeze(0)).tensor_split(own.size), -1).squeeze(0)
