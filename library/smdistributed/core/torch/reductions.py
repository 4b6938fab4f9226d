"""Reductions of what a rank holds itself, with torch: `core.reductions` where there is no compiled engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from smdistributed.core.flat import Flat
from smdistributed.core.torch.tensors import tensor_at

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


def reduces(dtype: str, op: str) -> bool:
    """Whether torch has such a reduction of such elements."""
    one = torch.ones(1, dtype=getattr(torch, dtype)) if hasattr(torch, dtype) else None
    try:
        return one is not None and _reduced([one, one], op) is not None
    except (KeyError, RuntimeError):  # no such reduction at all, or none of this dtype
        return False


def reduce(parts: Sequence[Flat], result: Flat, op: str) -> None:
    """Combine the parts, in their order, into `result`, which may be one of them; averages of integers towards zero."""
    tensor_at(result).copy_(_reduced([tensor_at(part) for part in parts], op))


def divide(total: Flat, by: int) -> None:
    """Divide in place; integers towards zero, as NCCL does."""
    _divide(tensor_at(total), by)


def _reduced(parts: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """float16 and bfloat16 in float32. Raises what torch raises where a dtype has no such reduction."""
    wide = parts[0].dtype in (torch.float16, torch.bfloat16)
    total = parts[0].float() if wide else parts[0].clone()
    for part in parts[1:]:
        _IN_PLACE[op](total, part.to(total.dtype))
    if op == "avg":
        _divide(total, len(parts))
    return total


def _divide(total: torch.Tensor, by: int) -> None:
    if total.is_floating_point():
        total.div_(by)
    else:
        total.div_(by, rounding_mode="trunc")
