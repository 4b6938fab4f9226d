"""Two ranks: each collective of NCCL, at once and asynchronous, gives NCCL's result and a complete handle."""

# mypy: disable-error-code="no-untyped-call,attr-defined,arg-type"
from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

rank, size = (int(os.environ[f"OMPI_COMM_WORLD_{name}"]) for name in ("RANK", "SIZE"))
dist.init_process_group("nccl", rank=rank, world_size=size)
RANK, SIZE = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(RANK)
OP = dist.ReduceOp
Result = tuple[Any, list[torch.Tensor]]


def mine(*numbers: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns `numbers`, each plus the rank, on this rank's GPU."""
    return torch.tensor([number + RANK for number in numbers], device="cuda").to(dtype)


def reduce(op: Any, dtype: torch.dtype = torch.float32) -> Callable[..., Result]:
    def run(**how: Any) -> Result:
        x = mine(1, 4, dtype=dtype)
        return dist.all_reduce(x, op, **how), [x]

    return run


def reduce_to_first(**how: Any) -> Result:
    x = mine(1, 4)
    work = dist.reduce(x, 0, OP.AVG, **how)
    return work, [x if RANK == 0 else torch.tensor([1.5, 4.5], device="cuda")]


def scatter_list(**how: Any) -> Result:
    out = torch.empty(1, device="cuda")
    return dist.reduce_scatter(out, [mine(1), mine(1)], OP.AVG, **how), [out]


def scatter_tensor(op: Any) -> Callable[..., Result]:
    def run(**how: Any) -> Result:
        out, source = torch.empty(1, device="cuda"), mine(1, 1)
        work = dist.reduce_scatter_tensor(out, source, op, **how)
        assert source.tolist() == [1 + RANK] * 2, "the input is unchanged"
        return work, [out]

    return run


def gather_tensor(**how: Any) -> Result:
    out = torch.empty(SIZE, device="cuda")
    return dist.all_gather_into_tensor(out, mine(1), **how), [out]


def exchange(**how: Any) -> Result:
    out = torch.empty(2, device="cuda")
    return dist.all_to_all_single(out, torch.tensor([1.0 + RANK, 1.0 + RANK], device="cuda"), **how), [out]


def broadcast(**how: Any) -> Result:
    x = mine(7)
    return dist.broadcast(x, 0, **how), [x]


CASES: dict[str, tuple[Callable[..., Result], list[float]]] = {
    "sum": (reduce(OP.SUM), [3, 9]),
    "average": (reduce(OP.AVG), [1.5, 4.5]),
    "average of integers": (reduce(OP.AVG, torch.int64), [1, 4]),
    "booleans": (reduce(OP.SUM, torch.bool), [True, True]),
    "reduce": (reduce_to_first, [1.5, 4.5]),
    "reduce_scatter_tensor": (scatter_tensor(OP.SUM), [3]),
    "reduce_scatter_tensor, average": (scatter_tensor(OP.AVG), [1.5]),
    "all_gather_into_tensor": (gather_tensor, [1, 2]),
    "all_to_all_single": (exchange, [1, 2]),
    "broadcast": (broadcast, [7]),
}
if hasattr(dist, "_coalescing_manager"):  # torch 2.1, from which on gloo sums bfloat16 and scatters lists
    CASES["reduce_scatter"] = (scatter_list, [1.5])
    CASES["average of bfloat16"] = (reduce(OP.AVG, torch.bfloat16), [1.5, 4.5])
if hasattr(OP, "PREMUL_SUM") and hasattr(dist, "_make_nccl_premul_sum"):
    CASES["factor"] = (reduce(dist._make_nccl_premul_sum(0.25)), [0.75, 2.25])


def check(name: str, asynchronous: bool) -> None:
    collective, expected = CASES[name]
    work, results = collective(async_op=True) if asynchronous else collective()
    assert asynchronous == (work is not None), name
    if asynchronous:
        work.get_future().wait()
        assert work.wait() and work.is_completed(), name
    assert torch.cat(results).tolist() == expected, (name, asynchronous, results)


def functional() -> None:
    import torch.distributed._functional_collectives as collectives

    total = collectives.all_reduce(mine(1, 4), "avg", dist.group.WORLD)
    assert total.device.type == "cuda", total.device
    assert total.tolist() == [1.5, 4.5]
    part = collectives.reduce_scatter_tensor(mine(1, 4), "avg", 0, dist.group.WORLD)
    assert part.is_cuda and part.tolist() == [1.5 + 3 * RANK]
    whole = collectives.all_gather_tensor(mine(1), 0, dist.group.WORLD)
    assert whole.is_cuda and (whole + 1).tolist() == [2, 3]


for case in CASES:
    for is_async in (False, True):
        check(case, is_async)
if hasattr(dist, "_coalescing_manager"):
    values = [mine(1), mine(4)]
    with dist._coalescing_manager(device=torch.device("cuda", RANK), async_ops=True) as coalesced:
        for value in values:
            dist.all_reduce(value, OP.AVG)
    coalesced.wait()
    assert torch.cat(values).tolist() == [1.5, 4.5]
    functional()
print(f"collectives {RANK}")
