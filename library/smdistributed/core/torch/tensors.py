"""Tensors as the engines take them: contiguous, one-dimensional, on the CPU; and reductions of such, with torch.

The names of dtypes and reductions are those of `smdistributed.core.native`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch.distributed import ReduceOp

from smdistributed.core import native
from smdistributed.core.exceptions import SMDDPError

DTYPES: dict[torch.dtype, str] = {getattr(torch, name): name for name in native.DTYPES if hasattr(torch, name)}
OPS: dict[ReduceOp.RedOpType, str] = {getattr(ReduceOp, name.upper()): name for name in native.OPS}

_Reduce = Callable[[torch.Tensor, torch.Tensor], object]
_IN_PLACE: dict[str, _Reduce] = {
    "sum": torch.Tensor.add_,
    "avg": torch.Tensor.add_,
    "product": torch.Tensor.mul_,
    "min": lambda total, other: torch.minimum(total, other, out=total),
    "max": lambda total, other: torch.maximum(total, other, out=total),
    "band": torch.Tensor.bitwise_and_,
    "bor": torch.Tensor.bitwise_or_,
    "bxor": torch.Tensor.bitwise_xor_,
}


class Flat:
    """A tensor of any shape and strides as one contiguous dimension, complex numbers as two real ones.

    What is written into it is in the tensor after `give_back`, or when a `with` block ends well.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
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
    return Flat(tensor).flat


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


def as_bytes(flat: torch.Tensor) -> torch.Tensor:
    """The same memory, as bytes. A single element may have any stride, which torch would refuse."""
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def reduce(parts: Sequence[torch.Tensor], result: torch.Tensor, op: str) -> None:
    """Combine the parts, in their order, into `result`; float16 and bfloat16 in float32, rounded once.

    Any of the parts may be `result` itself. Raises what torch raises where a dtype has no such reduction.
    """
    wide = result.dtype in (torch.float16, torch.bfloat16)
    total = parts[0].float() if wide else parts[0].clone()
    for part in parts[1:]:
        _IN_PLACE[op](total, part.to(total.dtype))
    if op == "avg":
        divide(total, len(parts))
    result.copy_(total)


def divide(total: torch.Tensor, by: int) -> None:
    """Divide in place; integers towards zero, as NCCL does."""
    if total.is_floating_point():
        total.div_(by)
    else:
        total.div_(by, rounding_mode="trunc")
