"""The ranks that share tensors (TP_GROUP), and operations on tensors over them that autograd knows.

Each operation is torch.distributed's own, on the device of its tensor, so that one path serves CPUs and GPUs. The
gradient of each is another operation of this module. On the meta device nothing is sent: shapes are right, for a trace.

Rows are the first axis: the batch. With `prescaled_batch` all ranks of the group have the same rows, and without it
each rank has rows of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Function

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


# --- between rows of this rank and work that all ranks share


def share_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the rows of all ranks: the input of a layer with split output channels."""
    own = tensor_group()
    if own.size == 1:
        return tensor
    return _Copy.apply(tensor) if own.same_rows else _GatherRows.apply(tensor)  # type: ignore[no-any-return,no-untyped-call]


def sum_partial(tensor: torch.Tensor) -> torch.Tensor:
    """Sums the ranks' results for the rows of all, and returns the rows of this rank."""
    own = tensor_group()
    if own.size == 1:
        return tensor
    return _Sum.apply(tensor) if own.same_rows else _SumRows.apply(tensor)  # type: ignore[no-any-return,no-untyped-call]


def sum_over_group(tensor: torch.Tensor) -> torch.Tensor:
    """Sums the ranks' results for the same rows. Each rank computes other results from the sum."""
    if tensor_group().size == 1:
        return tensor
    return _Copy.apply(_Sum.apply(tensor))  # type: ignore[no-any-return,no-untyped-call]


def rows_to_channels(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of the channels (the last axis) for the rows of all ranks."""
    own = tensor_group()
    if own.size == 1:
        return tensor
    return _TakeChannels.apply(tensor) if own.same_rows else _ToChannels.apply(tensor)  # type: ignore[no-any-return,no-untyped-call]


def channels_to_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Returns all channels for the rows of this rank. The inverse of `rows_to_channels`."""
    own = tensor_group()
    if own.size == 1:
        return tensor
    return _GatherChannels.apply(tensor) if own.same_rows else _ToRows.apply(tensor)  # type: ignore[no-any-return,no-untyped-call]


def gather_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the rows of all ranks of a tensor without a gradient, such as token numbers or a mask."""
    own = tensor_group()
    return tensor if own.size == 1 or own.same_rows else _gather(tensor.detach())


# --- gradients: each operation and its opposite


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _Sum.apply(gradient)  # type: ignore[no-untyped-call]


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return _sum(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _Copy.apply(gradient)  # type: ignore[no-untyped-call]


class _GatherRows(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return _gather(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _SumRows.apply(gradient)  # type: ignore[no-untyped-call]


class _SumRows(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return _sum_rows(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _GatherRows.apply(gradient)  # type: ignore[no-untyped-call]


class _ToChannels(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return _to_channels(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _ToRows.apply(gradient)  # type: ignore[no-untyped-call]


class _ToRows(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return _to_rows(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _ToChannels.apply(gradient)  # type: ignore[no-untyped-call]


class _TakeChannels(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return own_part(tensor, -1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _GatherChannels.apply(gradient)  # type: ignore[no-untyped-call]


class _GatherChannels(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return _gather_channels(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _TakeChannels.apply(gradient)  # type: ignore[no-untyped-call]


# --- without autograd


def own_part(tensor: torch.Tensor, axis: int) -> torch.Tensor:
    """Returns a contiguous copy of this rank's part along an axis; on the meta device a view."""
    own = tensor_group()
    part = tensor.tensor_split(own.size, axis)[own.rank]
    return part if tensor.is_meta else part.clone(memory_format=torch.contiguous_format)


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
