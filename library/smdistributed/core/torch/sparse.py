"""Sums sparse tensors (COO), such as the gradients of an EmbeddingBag(sparse=True), by gathering their elements."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from smdistributed.core.engines import Engine
from smdistributed.core.exceptions import SMDDPError
from smdistributed.core.torch.tensors import Flattened, flat_of


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
    """Writes each rank's rows into `parts`, by broadcasts, and returns all rows in rank order."""
    parts[rank].copy_(own)
    for root, part in enumerate(parts):
        with Flattened(part) as flat:
            engine.broadcast(flat_of(flat), root)
    return torch.cat(list(parts))
