"""Converts torch tensors to flat tensors, which communication engines take, and back.

Also checks the number, dtypes and sizes of a collective's tensors, and sums sparse ones.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch.distributed import ReduceOp

from smdistributed.core import native
from smdistributed.core.engines import Engine
from smdistributed.core.exceptions import SMDDPError
from smdistributed.core.flat import Flat

DTYPES: dict[torch.dtype, str] = {getattr(torch, name): name for name in native.DTYPES if hasattr(torch, name)}
OPS: dict[ReduceOp.RedOpType, str] = {getattr(ReduceOp, name.upper()): name for name in native.OPS}


class Flattened:
    """A tensor of any shape and strides as one contiguous dimension; complex numbers become two real ones.

    Elements written into `flat` are in the tensor after `copy_back`, or a `with` block. Raises SMDDPError if sparse.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        if tensor.layout is not torch.strided:
            raise SMDDPError(
                f"The backend smddp takes {tensor.layout} tensors only in all_reduce. Fix: use to_dense()."
            )
        dense = tensor.detach()
        self._tensor = torch.view_as_real(dense) if dense.is_complex() else dense
        self.flat = self._tensor.reshape(-1).contiguous()  # reshape keeps a single stride

    def copy_back(self) -> None:
        if self.flat.numel() and self.flat.data_ptr() != self._tensor.data_ptr():
            self._tensor.copy_(self.flat.view(self._tensor.shape))

    def __enter__(self) -> torch.Tensor:
        return self.flat

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.copy_back()


def read_only(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements, flat: a view if possible, otherwise a copy. Raises SMDDPError for a sparse tensor."""
    return Flattened(tensor).flat


def flat_of(tensor: torch.Tensor) -> Flat:
    """Returns the memory of a contiguous tensor, which it keeps alive; dtypes without reductions become bytes."""
    name = DTYPES.get(tensor.dtype)
    if name is None:
        return Flat(tensor.data_ptr(), size_of(tensor), "uint8", tensor)
    return Flat(tensor.data_ptr(), tensor.numel(), name, tensor)


def tensor_at(flat: Flat) -> torch.Tensor:
    """Returns the same memory as a tensor, which keeps its owner alive; a new empty tensor if there are no elements."""
    if not flat.count:
        return torch.empty(0, dtype=getattr(torch, flat.dtype))
    memory = (ctypes.c_char * flat.bytes).from_address(flat.address)
    memory.owner = flat.owner  # type: ignore[attr-defined]
    return torch.frombuffer(memory, dtype=getattr(torch, flat.dtype))


def premultiplied_by(operation: Any) -> Any:
    """Returns the factor of a premultiplied sum, a number or a tensor; only pickling it shows the factor."""
    _, factor = operation.__getstate__()
    return factor


def size_of(tensor: torch.Tensor) -> int:
    """Returns the size in bytes (torch 2.0 has no `nbytes`)."""
    return tensor.numel() * tensor.element_size()


def require_parts(what: str, flats: Sequence[torch.Tensor], dtype: torch.dtype | None, count: int) -> None:
    """Raises SMDDPError unless `count` tensors have `dtype`: the C engine would access memory beyond them."""
    if len(flats) != count:
        raise SMDDPError(f"The {what} are {len(flats)} tensors. Fix: pass one for each of the {count} ranks.")
    for flat in flats:
        if flat.dtype != dtype:
            raise SMDDPError(f"The {what} have {flat.dtype} and {dtype}. Fix: give all tensors one dtype.")


def require_alike(what: str, flats: Sequence[torch.Tensor], like: torch.Tensor, count: int) -> None:
    """Raises SMDDPError unless there are `count` tensors, all with the dtype and number of elements of `like`."""
    require_parts(what, flats, like.dtype, count)
    for flat in flats:
        if flat.numel() != like.numel():
            raise SMDDPError(f"The {what} have {flat.numel()} and {like.numel()} elements. Fix: give all as many.")


def all_reduce_sparse(engine: Engine, rank: int, size: int, tensor: torch.Tensor, op: str) -> None:
    """Sums or averages a sparse tensor in place: coalesced, with all ranks' indices, float16 and bfloat16 in float32.

    Averages of integers are rounded towards zero. Raises SMDDPError for another `op` than "sum" and "avg", or layout.
    """
    if op not in ("sum", "avg"):
        raise SMDDPError(
            f"The backend smddp reduces sparse tensors with sum and avg, not with {op}. Fix: use to_dense()."
        )
    if tensor.layout is not torch.sparse_coo:
        raise SMDDPError(f"The backend smddp does not reduce tensors of {tensor.layout}. Fix: use to_sparse_coo().")
    given = tensor.coalesce()
    indices, values = given.indices(), given.values()
    counts = _gathered_counts(engine, size, values.shape[0])
    all_indices = _gathered(engine, rank, [indices.new_empty(count, indices.shape[0]) for count in counts], indices.t())
    wide = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
    all_values = _gathered(engine, rank, [wide.new_empty(count, *wide.shape[1:]) for count in counts], wide)
    total = torch.sparse_coo_tensor(all_indices.t(), all_values, tensor.shape, check_invariants=False).coalesce()
    summed = total.values()
    if op == "avg":
        summed = summed / size if summed.is_floating_point() else summed.div(size, rounding_mode="trunc")
    values = summed.to(tensor.dtype)
    with torch.no_grad():
        tensor.copy_(torch.sparse_coo_tensor(total.indices(), values, tensor.shape, check_invariants=False))


def _gathered_counts(engine: Engine, size: int, count: int) -> list[int]:
    counts = torch.zeros(size, dtype=torch.int64)
    engine.gather(flat_of(torch.tensor([count])), [flat_of(one) for one in counts.chunk(size)])
    return [int(one) for one in counts]


def _gathered(engine: Engine, rank: int, parts: Sequence[torch.Tensor], own: torch.Tensor) -> torch.Tensor:
    parts[rank].copy_(own)
    for root, part in enumerate(parts):
        with Flattened(part) as flat:
            engine.broadcast(flat_of(flat), root)
    return torch.cat(list(parts))
