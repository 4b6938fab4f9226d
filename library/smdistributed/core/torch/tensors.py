"""Tensors as the engines take them (`core.flat`): contiguous, one-dimensional, on the CPU; and such as tensors.

The names of dtypes and reductions are those of `smdistributed.core.native`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch.distributed import ReduceOp

from smdistributed.core import native
from smdistributed.core.exceptions import SMDDPError
from smdistributed.core.flat import Flat

DTYPES: dict[torch.dtype, str] = {getattr(torch, name): name for name in native.DTYPES if hasattr(torch, name)}
OPS: dict[ReduceOp.RedOpType, str] = {getattr(ReduceOp, name.upper()): name for name in native.OPS}


class Flattened:
    """A tensor of any shape and strides as one contiguous dimension, complex numbers as two real ones.

    What is written into it is in the tensor after `give_back`, or when a `with` block ends well.

    Raises SMDDPError for a sparse tensor.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        if tensor.layout is not torch.strided:
            raise SMDDPError(f"The backend smddp takes {tensor.layout} tensors in all_reduce alone: use to_dense().")
        dense = tensor.detach()
        self._tensor = torch.view_as_real(dense) if dense.is_complex() else dense
        self.flat = self._tensor.reshape(-1).contiguous()  # reshape keeps a single stride

    def give_back(self) -> None:
        if self.flat.numel() and self.flat.data_ptr() != self._tensor.data_ptr():
            self._tensor.copy_(self.flat.view(self._tensor.shape))

    def __enter__(self) -> torch.Tensor:
        return self.flat

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.give_back()


def read_only(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements, flat; a copy where they do not lie side by side."""
    return Flattened(tensor).flat


def flat_of(tensor: torch.Tensor) -> Flat:
    """A tensor's memory, for an engine; the tensor is contiguous, and lives as long as this. Other dtypes are bytes."""
    name = DTYPES.get(tensor.dtype)
    if name is None:
        return Flat(tensor.data_ptr(), size_of(tensor), "uint8", tensor)
    return Flat(tensor.data_ptr(), tensor.numel(), name, tensor)


def tensor_at(flat: Flat) -> torch.Tensor:
    """The same memory as a tensor, which keeps its owner."""
    if not flat.count:
        return torch.empty(0, dtype=getattr(torch, flat.dtype))
    memory = (ctypes.c_char * flat.bytes).from_address(flat.address)
    memory.owner = flat.owner  # type: ignore[attr-defined]
    return torch.frombuffer(memory, dtype=getattr(torch, flat.dtype))


def premultiplied_by(operation: Any) -> Any:
    """The factor of a premultiplied sum, a number or a tensor: torch shows it where it pickles one."""
    _, factor = operation.__getstate__()
    return factor


def size_of(tensor: torch.Tensor) -> int:
    """Bytes (`nbytes` is younger than torch 2.0)."""
    return tensor.numel() * tensor.element_size()


def require_parts(what: str, flats: Sequence[torch.Tensor], dtype: torch.dtype | None, count: int) -> None:
    """Raise SMDDPError unless there are `count` tensors, all of that dtype: memory beyond them is not theirs."""
    if len(flats) != count:
        raise SMDDPError(f"The {what} are {len(flats)} tensors: give one for each of the {count} ranks.")
    for flat in flats:
        if flat.dtype != dtype:
            raise SMDDPError(f"The {what} hold {flat.dtype} beside {dtype}: all tensors must be of one dtype.")


def require_alike(what: str, flats: Sequence[torch.Tensor], like: torch.Tensor, count: int) -> None:
    """Raise SMDDPError unless there are `count` tensors, all of the dtype of `like`, with as many elements."""
    require_parts(what, flats, like.dtype, count)
    for flat in flats:
        if flat.numel() != like.numel():
            raise SMDDPError(f"The {what} hold {flat.numel()} elements beside {like.numel()}: all must have as many.")
