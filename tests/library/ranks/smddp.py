"""One rank: every collective of the backend `smddp` on this rank's tensors, against what each rank can compute itself.

Every rank knows what the others give: rank r gives `given(r, …)`. References are computed in float64.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401 (registers the backend)
from smdistributed.core.torch.per_device import engine_of
from smdistributed.dataparallel.exceptions import SMDDPError

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (7, 3), (65, 129), (1_200_003,))
REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "SUM": lambda stacked: stacked.sum(0),
    "AVG": lambda stacked: stacked.mean(0),
    "MIN": lambda stacked: stacked.amin(0),
    "MAX": lambda stacked: stacked.amax(0),
    "PRODUCT": lambda stacked: stacked.prod(0),
}
BITWISE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}

faulthandler.dump_traceback_later(100, repeat=True)  # before whoever started this gives up
dist.init_process_group(backend="smddp")
RANK, SIZE = dist.get_rank(), dist.get_world_size()
EVERYBODY = range(SIZE)
IS_TORCHS = type(dist.group.WORLD) is dist.ProcessGroup
"""Whether the group is torch's own, with NCCL for CUDA tensors, as on_nccl.py has it."""
ENGINE: str = engine_of(dist.group.WORLD).engine  # type: ignore[union-attr]
DTYPES = (*FLOATS, *INTEGERS) if ENGINE.startswith("shm:") else (torch.bfloat16, torch.float32, torch.int16)
"""Between hosts bytes travel, and a message takes a thousand times as long."""
ROUNDINGS = 3 if "hosts" in ENGINE else 1  # each host's sum, and theirs
print(ENGINE)


def given(rank: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return drawn(rank, tuple(shape), dtype.is_floating_point).to(dtype, copy=True)


@functools.cache  # it takes longer than the collectives
def drawn(rank: int, shape: tuple[int, ...], floating: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    if floating:
        return torch.randn(shape, generator=generator, dtype=torch.float64)
    return torch.randint(0, 5, shape, generator=generator)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """As close as sums in float32, and their roundings to the dtype, are."""
    tolerance = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 2e-6}.get(found.dtype, 1e-12)
    tolerance *= ROUNDINGS
    torch.testing.assert_close(found.double(), expected.to(found.dtype).double(), rtol=tolerance, atol=tolerance)


def same_everywhere(tensor: torch.Tensor) -> None:
    """Bit for bit."""
    seen: list[object] = [None] * SIZE
    dist.all_gather_object(seen, tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    assert len(set(seen)) == 1


def cases() -> Iterator[tuple[tuple[int, ...], torch.dtype]]:
    for shape in SHAPES:
        for dtype in DTYPES:
            large = len(shape) == 1 and shape[0] > 1000
            if not large or dtype in (torch.float32, torch.bfloat16):
                yield shape, dtype


def all_reduce() -> None:
    for shape, dtype in cases():
        for name, reference in REDUCTIONS.items():
            large = shape == SHAPES[-1] and name not in ("SUM", "AVG")
            if large or (name == "AVG" and not dtype.is_floating_point):
                continue
            tensor = given(RANK, shape, dtype)
            work = dist.all_reduce(tensor, op=getattr(dist.ReduceOp, name), async_op=tensor.numel() % 2 == 0)
            if work is not None:
                work.wait()
                assert work.is_completed()
            close(tensor, reference(torch.stack([given(rank, shape, dtype).double() for rank in EVERYBODY])))
    same_everywhere(tensor)


def long() -> None:
    """Between hosts it goes in several pieces, which overlap."""
    numbers = torch.arange(7_000_003) % 97
    tensor = (numbers * (RANK + 1)).short()
    dist.all_reduce(tensor)
    assert torch.equal(tensor, (numbers * sum(rank + 1 for rank in EVERYBODY)).short())


def bitwise() -> None:
    for name, reference in BITWISE.items():
        tensor = given(RANK, (33,), torch.int32)
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, name))
        expected = given(0, (33,), torch.int32)
        for rank in EVERYBODY[1:]:
            expected = reference(expected, given(rank, (33,), torch.int32))
        assert torch.equal(tensor, expected)


def strides() -> None:
    base = given(RANK, (40, 60), torch.float32)
    for view in (base.t(), base[::2, 1::3], base[3]):
        before = base.clone()
        expected = (
            torch.stack(
                [
                    given(rank, (40, 60), torch.float32).as_strided(view.shape, view.stride(), view.storage_offset())
                    for rank in EVERYBODY
                ]
            )
            .double()
            .sum(0)
        )
        dist.all_reduce(view)
        close(view, expected)
        assert (base != before).sum() <= view.numel(), "nothing beside the view has changed"
        base.copy_(given(RANK, (40, 60), torch.float32))


def broadcast() -> None:
    for shape, dtype in cases():
        for root in {0, SIZE - 1}:
            tensor = given(RANK, shape, dtype)
            dist.broadcast(tensor, src=root)
            assert torch.equal(tensor, given(root, shape, dtype))


def all_gather() -> None:
    for shape, dtype in cases():
        outputs = [torch.empty(shape, dtype=dtype) for _ in EVERYBODY]
        dist.all_gather(outputs, given(RANK, shape, dtype))
        for rank, output in enumerate(outputs):
            assert torch.equal(output, given(rank, shape, dtype))
        if shape:
            together = torch.empty((SIZE * shape[0], *shape[1:]), dtype=dtype)
            dist.all_gather_into_tensor(together, given(RANK, shape, dtype))
            assert torch.equal(together, torch.cat([given(rank, shape, dtype) for rank in EVERYBODY]))


def reduce_scatter() -> None:
    for shape, dtype in cases():
        if not shape:
            continue
        whole = (SIZE * shape[0], *shape[1:])
        output = torch.empty(shape, dtype=dtype)
        dist.reduce_scatter_tensor(output, given(RANK, whole, dtype))
        reduced = torch.stack([given(rank, whole, dtype).double() for rank in EVERYBODY]).sum(0)
        close(output, reduced.chunk(SIZE)[RANK] if reduced.numel() else reduced)
        dist.reduce_scatter(output, list(given(RANK, whole, dtype).chunk(SIZE)) if output.numel() else [output] * SIZE)
        close(output, reduced.chunk(SIZE)[RANK] if reduced.numel() else reduced)


def averages_of_integers() -> None:
    """Towards zero, as NCCL does."""
    tensor = torch.tensor([-7 - RANK, 7 + RANK])
    dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
    total = sum(7 + rank for rank in EVERYBODY)
    assert tensor.tolist() == [-(total // SIZE), total // SIZE]


def other_dtypes() -> None:
    numbers = torch.complex(*(given(RANK, (17,), torch.float32) for _ in "ri"))
    dist.all_reduce(numbers)
    expected = torch.stack([given(rank, (17,), torch.float32).double() for rank in EVERYBODY]).sum(0)
    close(numbers.real, expected)
    close(numbers.imag, expected)
    flags = torch.tensor([RANK == 0, True, False])
    dist.all_reduce(flags)
    assert flags.tolist() == [True, True, False]
    dist.all_reduce(flags, op=dist.ReduceOp.MIN)
    assert flags.tolist() == [True, True, False]


def not_a_number() -> None:
    tensor = torch.tensor([float("nan") if RANK == SIZE - 1 else 1.0, float("inf")], dtype=torch.bfloat16)
    for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.SUM):
        found = tensor.clone()
        dist.all_reduce(found, op=op)
        assert found.isnan().tolist() == [True, False]


def what_is_not_reduced() -> None:
    try:
        dist.all_reduce(torch.ones(3), op=dist.ReduceOp.BXOR)
    except RuntimeError as error:
        assert "does not reduce torch.float32 with bxor" in str(error), error
    else:
        raise AssertionError("not refused")


def premultiplied() -> None:
    if IS_TORCHS:  # refused: see by_device.py
        return
    tensor = given(RANK, (9,), torch.float32)
    dist.all_reduce(tensor, op=dist._make_nccl_premul_sum(0.5))  # type: ignore[attr-defined]
    close(tensor, torch.stack([given(rank, (9,), torch.float32).double() for rank in EVERYBODY]).sum(0) * 0.5)


def reduce() -> None:
    for shape, dtype in cases():
        tensor = given(RANK, shape, dtype)
        dist.reduce(tensor, dst=SIZE - 1)
        if RANK == SIZE - 1:
            close(tensor, torch.stack([given(rank, shape, dtype).double() for rank in EVERYBODY]).sum(0))
        else:
            assert torch.equal(tensor, given(RANK, shape, dtype))


def gather_and_scatter() -> None:
    for shape, dtype in cases():
        for root in {0, SIZE - 1}:
            parts = [torch.empty(shape, dtype=dtype) for _ in EVERYBODY] if root == RANK else None
            dist.gather(given(RANK, shape, dtype), parts, dst=root)
            for rank, part in enumerate(parts or ()):
                assert torch.equal(part, given(rank, shape, dtype))
            tensor = torch.empty(shape, dtype=dtype)
            dist.scatter(tensor, parts, src=root)
            assert torch.equal(tensor, given(RANK, shape, dtype))


def all_to_all() -> None:
    for rows in (0, 1, 3, 40_000):
        sent = given(RANK, (SIZE * rows, 2), torch.float32)
        output = torch.empty_like(sent)
        dist.all_to_all_single(output, sent)
        expected = [given(rank, (SIZE * rows, 2), torch.float32)[RANK * rows : (RANK + 1) * rows] for rank in EVERYBODY]
        assert torch.equal(output, torch.cat(expected))
    sizes = [[(first + 2 * second) % 3 for second in EVERYBODY] for first in EVERYBODY]  # some are 0
    sent = given(RANK, (sum(sizes[RANK]), 5), torch.int16)
    wanted = [sizes[rank][RANK] for rank in EVERYBODY]
    output = torch.empty(sum(wanted), 5, dtype=torch.int16)
    dist.all_to_all_single(output, sent, wanted, sizes[RANK])
    theirs = [torch.split(given(rank, (sum(sizes[rank]), 5), torch.int16), sizes[rank])[RANK] for rank in EVERYBODY]
    assert torch.equal(output, torch.cat(theirs))
    outputs = [torch.empty(rank + 1) for rank in EVERYBODY]
    dist.all_to_all(outputs, [torch.full((RANK + 1,), float(rank)) for rank in EVERYBODY])
    assert all(output.tolist() == [float(RANK)] * (rank + 1) for rank, output in enumerate(outputs))


def uneven() -> None:
    outputs = [torch.empty(rank) for rank in EVERYBODY]
    dist.all_gather(outputs, torch.full((RANK,), float(RANK)))
    assert all(output.tolist() == [float(rank)] * rank for rank, output in enumerate(outputs))
    output = torch.empty(RANK + 1)
    dist.reduce_scatter(output, [torch.full((rank + 1,), float(rank)) for rank in EVERYBODY])
    assert output.tolist() == [float(RANK * SIZE)] * (RANK + 1)


def messages() -> None:
    tensor = given(RANK, (5,), torch.float32)
    if SIZE > 1 and RANK < 2:
        (dist.send if RANK == 0 else dist.recv)(tensor, 1 - RANK)
        assert torch.equal(tensor, given(0, (5,), torch.float32))
    objects: list[object] = [{"rank": 0} if RANK == 0 else None]
    dist.broadcast_object_list(objects)
    assert objects == [{"rank": 0}]
    found: list[object] = [None] * SIZE
    dist.all_gather_object(found, {"rank": RANK, "words": "x" * RANK})
    assert found == [{"rank": rank, "words": "x" * rank} for rank in EVERYBODY]


def coalesced() -> None:
    tensors = [given(RANK, (size,), torch.float32) for size in (3, 50_000)]
    dist.all_reduce_coalesced(tensors)
    for tensor in tensors:
        close(tensor, torch.stack([given(rank, tensor.shape, tensor.dtype).double() for rank in EVERYBODY]).sum(0))
    if not hasattr(dist, "_coalescing_manager"):  # torch 2.0
        return
    outputs = [torch.empty(SIZE * size) for size in (3, 7)]
    with dist._coalescing_manager():
        for output, size in zip(outputs, (3, 7)):
            dist.all_gather_into_tensor(output, given(RANK, (size,), torch.float32))
    for output, size in zip(outputs, (3, 7)):
        assert torch.equal(output, torch.cat([given(rank, (size,), torch.float32) for rank in EVERYBODY]))


def any_shape_and_strides() -> None:
    """Slices, transposes and broadcast sources, drawn alike on every rank."""
    drawn = random.Random(7)
    for _ in range(60 if ENGINE.startswith("shm:") else 20):
        shape = [drawn.randint(1, 9) for _ in range(drawn.randint(1, 4))]
        steps = tuple(slice(drawn.randint(0, 1), None, drawn.randint(1, 3)) for _ in shape)
        order = drawn.sample(range(len(shape)), len(shape))
        dtype = drawn.choice(DTYPES)

        def view(rank: int) -> torch.Tensor:
            return given(rank, shape, dtype)[steps].permute(order)  # noqa: B023 (called in this turn)

        tensor = view(RANK)
        dist.all_reduce(tensor)
        close(tensor, torch.stack([view(rank).double() for rank in EVERYBODY]).sum(0))
        outputs = [torch.empty_like(tensor).t() if tensor.dim() == 2 else torch.empty_like(tensor) for _ in EVERYBODY]
        if tensor.dim() != 2:
            dist.all_gather(outputs, view(RANK))
            assert all(torch.equal(output, view(rank)) for rank, output in enumerate(outputs))


def in_flight() -> None:
    """Many at once, small ones after large ones: the order is that of the calls."""
    tensors = [torch.full((size,), float(RANK + index)) for index, size in enumerate((300_000, 1, 200_000, 2, 3) * 4)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()
    for index, tensor in enumerate(tensors):
        assert set(tensor.tolist()) == {sum(rank + index for rank in EVERYBODY)}


def a_handle_blocks_nobody() -> None:
    """Rank 1 comes to the collective only after what rank 0 does next."""
    tensor, word = torch.tensor([1.0]), torch.tensor([0.0])
    if RANK == 0 and SIZE > 1:
        work = dist.all_reduce(tensor, async_op=True)
        dist.send(word, 1)
    else:
        if RANK == 1:
            dist.recv(word, 0)
        work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    assert tensor.item() == SIZE


def groups() -> None:
    """A group of some of the ranks, and another backend beside this one."""
    some = dist.new_group(list(EVERYBODY[:2]))
    gloo = dist.new_group(backend="gloo")
    for group, ranks in ((some, EVERYBODY[:2]), (gloo, EVERYBODY)):
        if RANK in ranks:
            tensor = torch.tensor([float(RANK)])
            dist.all_reduce(tensor, group=group)
            assert tensor.item() == sum(ranks)
    dist.barrier()


def refused() -> None:
    """Calls that would access memory beyond a tensor."""
    one, many = torch.zeros(2), [torch.zeros(2) for _ in EVERYBODY]
    calls: dict[str, Callable[[], object]] = {
        "Fix: give it the elements of all ": lambda: dist.all_gather_into_tensor(torch.zeros(2 * SIZE), torch.ones(6)),
        "torch.float16": lambda: dist.all_gather(many, one.half()),
        "torch.int32": lambda: dist.reduce_scatter(one.int(), many),
        "have 2 and 5 elements": lambda: dist.reduce_scatter_tensor(torch.ones(5), torch.ones(2 * SIZE)),
        "pass one for each": lambda: dist.all_gather([*many, one], one),
    }
    for words, call in calls.items():
        try:
            call()
        except (RuntimeError, ValueError, TypeError) as error:
            assert words in str(error) or not isinstance(error, SMDDPError), error
        else:
            raise AssertionError(f"not refused: {words}")


def from_a_callback() -> None:
    """What a handle's callback asks for does not wait for the handle."""
    first, second = torch.ones(3), torch.ones(3)
    chained = (
        dist.all_reduce(first, async_op=True)
        .get_future()
        .then(lambda _: dist.all_reduce(second, async_op=True).get_future().wait())
    )
    chained.wait()
    assert second.tolist() == [SIZE] * 3


def collected_meanwhile() -> None:
    """torch's C++ holds a handle that nothing in Python names, and the garbage collector runs before it waits."""
    everybody, ended = dist.group.WORLD, threading.Event()
    assert everybody is not None

    def collect() -> None:
        while not ended.is_set():
            gc.collect(0)

    collector = threading.Thread(target=collect)
    usual = sys.getswitchinterval()
    sys.setswitchinterval(usual / 100)  # the collector runs between any two steps, and nobody waits long for it
    collector.start()
    try:
        for _ in range(100):
            dist._broadcast_coalesced(everybody, [torch.ones(4), torch.ones(8)], 16, 0)  # type: ignore[attr-defined]
    finally:
        ended.set()
        collector.join()
        sys.setswitchinterval(usual)


def sparse() -> None:
    """Other indices on every rank, some of them twice, and none on the last."""
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            tensor = sparse_of(RANK, dtype)
            dist.all_reduce(tensor, op=op)
            total = torch.stack([sparse_of(rank, dtype).to_dense().double() for rank in EVERYBODY]).sum(0)
            assert tensor.is_sparse and tensor.dtype is dtype
            expected = (total / SIZE).trunc() if dtype is torch.int64 else total / SIZE
            close(tensor.to_dense(), expected if op == dist.ReduceOp.AVG else total)
    calls: tuple[Callable[[], object], ...] = (
        lambda: dist.all_reduce(sparse_of(RANK, torch.float32), op=dist.ReduceOp.MAX),
        lambda: dist.broadcast(sparse_of(RANK, torch.float32), src=0),
    )
    for call in calls:
        try:
            call()
        except SMDDPError as error:
            assert "use to_dense()" in str(error), error
        except NotImplementedError:  # torch's own words for what it has no operator for
            assert IS_TORCHS
        else:
            raise AssertionError("not refused")


def sparse_of(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """(20, 3), of which rows are sparse."""
    count = 0 if rank == SIZE - 1 and SIZE > 1 else 5 + rank
    rows = torch.tensor([[(3 * number + rank) % 7 for number in range(count)]], dtype=torch.int64).view(1, count)
    return torch.sparse_coo_tensor(rows, given(rank, (count, 3), dtype), (20, 3))


def dropped_handles() -> None:
    """What nobody waits for is given up when it has ended, its tensor with it. Old versions of torch: see `_Handle`."""
    if not hasattr(dist.AllreduceOptions(), "asyncOp") or IS_TORCHS:
        return
    tensor = torch.ones(1000)
    dropped = weakref.ref(tensor)
    dist.all_reduce(tensor, async_op=True)
    del tensor
    dist.barrier()
    assert is_given_up(dropped)


def is_given_up(reference: weakref.ref[Any]) -> bool:
    """Whether an object goes within five seconds."""
    for _ in range(100):
        gc.collect()
        if reference() is None:
            return True
        time.sleep(0.05)
    return False


def again() -> None:
    """Another group of all ranks after the first, of two backends: gloo has the tensors on the CPU."""
    if IS_TORCHS:  # torch's own affair
        return
    everybody: Any = dist.group.WORLD
    first = weakref.ref(everybody)
    store: Any = dist.distributed_c10d._get_default_store()
    del everybody
    dist.destroy_process_group()
    assert is_given_up(first), "with its store, which torch may open anew on the same port"
    dist.init_process_group("cpu:gloo,cuda:smddp", store=PrefixStore("second", store), rank=RANK, world_size=SIZE)
    everybody = dist.group.WORLD
    assert everybody.engine.partition(":")[0] == ENGINE.partition(":")[0]
    assert torch.device("cpu") in everybody._device_types
    ours: list[str] = []
    run = everybody._queue.run

    def noting(owner: Any, name: str, *arguments: Any) -> Any:
        ours.append(name)
        return run(owner, name, *arguments)

    everybody._queue.run = noting
    tensors = [torch.ones(3), torch.ones(2)]
    for tensor in tensors:
        dist.all_reduce(tensor)
    dist.all_reduce_coalesced(tensors)
    assert [tensor.tolist() for tensor in tensors] == [[SIZE**2] * 3, [SIZE**2] * 2]
    if hasattr(dist, "_coalescing_manager"):  # gloo of torch 2.0 has neither
        gathered, scattered = torch.empty(2 * SIZE), torch.empty(2)
        dist.all_gather_into_tensor(gathered, torch.full((2,), float(RANK)))
        assert gathered.tolist() == [float(rank) for rank in EVERYBODY for _ in range(2)]
        dist.reduce_scatter_tensor(scattered, gathered)
        assert scattered.tolist() == [float(RANK * SIZE)] * 2
    assert ours == []
    dist.barrier()
    assert ours == ["barrier"]
    del everybody
    dist.destroy_process_group()
    dist.init_process_group("cpu:smddp,cuda:gloo", store=PrefixStore("third", store), rank=RANK, world_size=SIZE)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [SIZE] * 3
    try:
        dist.new_group(backend="cpu:mpi,cuda:smddp")
    except Exception as error:
        assert "cpu:gloo, cuda:gloo, cuda:nccl" in str(error) or "MPI" in str(error), error
    else:
        raise AssertionError("not refused")


def parameters() -> None:
    parameter = torch.nn.Parameter(torch.ones(5))
    dist.all_reduce(parameter)
    assert parameter.tolist() == [SIZE] * 5


CHECKS = (
    *(all_reduce, long, bitwise, averages_of_integers, other_dtypes, not_a_number, what_is_not_reduced, premultiplied),
    *(strides, any_shape_and_strides, broadcast, all_gather, reduce_scatter, reduce, gather_and_scatter, all_to_all),
    *(uneven, messages, coalesced, in_flight, a_handle_blocks_nobody, from_a_callback, collected_meanwhile),
    *(parameters, sparse, dropped_handles, refused, groups, again),
)
for check in CHECKS:
    try:
        check()
    except Exception as error:
        raise AssertionError(f"{check.__name__} on rank {RANK}") from error
dist.destroy_process_group()
