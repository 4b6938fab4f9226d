"""One rank: every collective of torch.distributed through `smddp`, of tensors on a device: `on_device.py DEVICE`.

Ranks that have a CUDA device each go through NCCL, those that share one through copies on the host. What the two have
in common is checked: tensors of equal sizes, contiguous, of dtypes that NCCL has.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401 (registers the backend)

DEVICE = torch.device(sys.argv[1])
dist.init_process_group(backend="smddp")
RANK, SIZE = dist.get_rank(), dist.get_world_size()
SHAPES: tuple[tuple[int, ...], ...] = ((1,), (7, 3), (100_003,))
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int32, torch.int64)


def given(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, whose sums and products are exact in every dtype."""
    drawn = torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(rank))
    return drawn.to(DEVICE).to(dtype)


def cases() -> Iterator[tuple[tuple[int, ...], torch.dtype]]:
    for shape in SHAPES:
        for dtype in DTYPES:
            yield shape, dtype


def of_all(shape: tuple[int, ...]) -> torch.Tensor:
    """Every rank's, in float64: old versions of torch compute little in float16 on the CPU."""
    return torch.stack([given(rank, shape, torch.float64) for rank in range(SIZE)])


def all_reduce() -> None:
    for shape, dtype in cases():
        everybodys = of_all(shape)
        for name, expected in (
            ("SUM", everybodys.sum(0)),
            ("MAX", everybodys.amax(0)),
            ("MIN", everybodys.amin(0)),
            ("PRODUCT", everybodys.prod(0)),
        ):
            for is_async in (False, True):
                tensor = given(RANK, shape, dtype)
                work = dist.all_reduce(tensor, op=getattr(dist.ReduceOp, name), async_op=is_async)
                if work is not None:
                    work.wait()
                assert torch.equal(tensor, expected.to(dtype)), (name, shape, dtype)
    tensor = torch.full((5,), float(RANK), device=DEVICE)
    dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
    assert tensor.tolist() == [sum(range(SIZE)) / SIZE] * 5


def several_at_once() -> None:
    tensors = [torch.full((size,), float(RANK), device=DEVICE) for size in (3, 5000)]
    dist.all_reduce_coalesced(tensors)
    assert all(set(tensor.tolist()) == {sum(range(SIZE))} for tensor in tensors)


def rooted() -> None:
    for shape, dtype in cases():
        for root in {0, SIZE - 1}:
            tensor = given(RANK, shape, dtype)
            dist.broadcast(tensor, src=root)
            assert torch.equal(tensor, given(root, shape, dtype))
            tensor = given(RANK, shape, dtype)
            dist.reduce(tensor, dst=root)
            if root == RANK:
                assert torch.equal(tensor, of_all(shape).sum(0).to(dtype))
            parts = [torch.empty_like(tensor) for _ in range(SIZE)] if root == RANK else None
            dist.gather(given(RANK, shape, dtype), parts, dst=root)
            for rank, part in enumerate(parts or ()):
                assert torch.equal(part, given(rank, shape, dtype))
            dist.scatter(tensor, parts, src=root)
            assert torch.equal(tensor, given(RANK, shape, dtype))


def gathered() -> None:
    for shape, dtype in cases():
        outputs = [torch.empty(shape, dtype=dtype, device=DEVICE) for _ in range(SIZE)]
        dist.all_gather(outputs, given(RANK, shape, dtype))
        together = torch.empty((SIZE * shape[0], *shape[1:]), dtype=dtype, device=DEVICE)
        dist.all_gather_into_tensor(together, given(RANK, shape, dtype))
        expected = [given(rank, shape, dtype) for rank in range(SIZE)]
        assert all(map(torch.equal, outputs, expected))
        assert torch.equal(together, torch.cat(expected))


def scattered() -> None:
    for shape, dtype in cases():
        whole = (SIZE * shape[0], *shape[1:])
        expected = of_all(whole).sum(0).to(dtype).chunk(SIZE)[RANK]
        output = torch.empty(shape, dtype=dtype, device=DEVICE)
        dist.reduce_scatter_tensor(output, given(RANK, whole, dtype))
        assert torch.equal(output, expected)
        output.zero_()
        dist.reduce_scatter(output, list(given(RANK, whole, dtype).chunk(SIZE)))
        assert torch.equal(output, expected)


def exchanged() -> None:
    sent = given(RANK, (SIZE * 3, 2), torch.float32)
    expected = torch.cat([given(rank, (SIZE * 3, 2), torch.float32)[RANK * 3 : RANK * 3 + 3] for rank in range(SIZE)])
    output = torch.empty_like(sent)
    dist.all_to_all_single(output, sent)
    assert torch.equal(output, expected)
    outputs = [torch.empty(3, 2, device=DEVICE) for _ in range(SIZE)]
    dist.all_to_all(outputs, list(sent.chunk(SIZE)))
    assert torch.equal(torch.cat(outputs), expected)


def messages() -> None:
    tensor = given(RANK, (5,), torch.float32)
    if SIZE > 1 and RANK < 2:
        (dist.send if RANK == 0 else dist.recv)(tensor, 1 - RANK)
        assert torch.equal(tensor, given(0, (5,), torch.float32))
    found: list[Any] = [None] * SIZE
    dist.all_gather_object(found, RANK)
    assert found == list(range(SIZE))
    dist.barrier()


def groups() -> None:
    for ranks in ([0], list(range(SIZE))):
        group = dist.new_group(ranks)
        if RANK in ranks:
            tensor = torch.ones(3, device=DEVICE)
            dist.all_reduce(tensor, group=group)
            assert tensor.tolist() == [len(ranks)] * 3


for check in (all_reduce, several_at_once, rooted, gathered, scattered, exchanged, messages, groups):
    try:
        check()
    except Exception as error:
        raise AssertionError(f"rank {RANK}: {check.__name__}: {error}") from error
    if RANK == 0:
        print(check.__name__, flush=True)
dist.destroy_process_group()
