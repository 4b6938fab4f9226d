"""One rank, on a stand-in for NCCL: `smddp` is torch's own process group, with a backend for each type of device."""

from __future__ import annotations

import faulthandler
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

import torch
import torch.distributed as dist
from tests.library import nccl_stand_in

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401 (registers the backend)
from smdistributed.core.torch import backend, per_device
from smdistributed.core.torch.per_device import engine_of
from smdistributed.core.torch.process_group import ProcessGroup
from smdistributed.dataparallel.exceptions import SMDDPError, SMDDPNCCLError

faulthandler.dump_traceback_later(100, repeat=True)  # before whoever started this gives up
NCCL = nccl_stand_in.install()
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
dist.init_process_group(backend="smddp")
RANK, SIZE = dist.get_rank(), dist.get_world_size()


def is_torchs(group: Any, name: str, config: str) -> None:
    """A group is torch's own, and knows its backends by their names."""
    assert type(group) is dist.ProcessGroup
    assert dist.get_backend(group) == name
    assert dist.get_backend_config(group) == config
    assert set(group._device_types) == {CPU, CUDA}
    assert type(group._get_backend(CUDA)) is NCCL
    assert type(group._get_backend(CPU)) is dist.ProcessGroupGloo


def in_each_way_of_asking() -> None:
    everybody: Any = dist.group.WORLD
    is_torchs(everybody, "smddp", "cpu:smddp,cuda:nccl")
    assert everybody._get_backend(CUDA).options.group_name == everybody.group_name  # the flight recorder's names
    for asked, config in (
        (None, "cpu:smddp,cuda:nccl"),
        ("smddp", "cpu:smddp,cuda:nccl"),
        ("cpu:smddp,cuda:smddp", "cpu:smddp,cuda:nccl"),
        ("cpu:smddp,cuda:nccl", "cpu:smddp,cuda:nccl"),
        ("cpu:gloo,cuda:smddp", "cpu:gloo,cuda:nccl"),
    ):
        group = dist.new_group(backend=asked)
        is_torchs(group, asked or "smddp", config)
        assert (engine_of(group) is None) == ("gloo" in config)
        tensor = torch.full((3,), float(RANK))
        dist.all_reduce(tensor, group=group)
        assert tensor.tolist() == [sum(range(SIZE))] * 3
    if NCCL.__name__ == "ProcessGroupNCCL2":
        everybody.bound_device_id = torch.device("cuda", 0)  # torch may then split NCCL, on all ranks or on none
    some = dist.new_group([0], backend="smddp")
    everybody.bound_device_id = None
    assert (engine_of(some) is not None) == (RANK == 0)


def cuda_tensors_meet_no_code_of_ours() -> None:
    """Each operator's kernel for CUDA is torch's own, in C++."""
    for operator in per_device._METHODS:
        kernels = torch._C._dispatch_dump(f"c10d::{operator}").splitlines()
        ours = {line.partition(":")[0] for line in kernels if "per_device.py" in line}
        assert "CPU" in ours, (operator, kernels)
        assert ours <= {"CPU", "SparseCPU"}, (operator, ours)
        (cuda,) = (line for line in kernels if line.startswith("CUDA:"))
        assert "Ops.cpp" in cuda, cuda


def the_engine_has_the_cpu() -> None:
    """gloo does not reduce int16."""
    tensor = torch.full((3,), RANK, dtype=torch.int16)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [sum(range(SIZE))] * 3


def leaves_groups_of_others_alone() -> None:
    group = dist.new_group(backend="gloo")
    for _ in range(500):  # gloo's threads drop tensors meanwhile, and need the GIL
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=group)
        gathered = [torch.empty(2) for _ in range(SIZE)]
        dist.all_gather(gathered, torch.full((2,), float(RANK)), group=group, async_op=True).wait()
        assert tensor.tolist() == [SIZE] * 3
        assert [one.tolist() for one in gathered] == [[rank, rank] for rank in range(SIZE)]
    try:
        dist.all_reduce(tensor.short(), group=group)
    except RuntimeError as error:
        assert "Invalid scalar type" in str(error), error
    else:
        raise AssertionError("gloo reduces int16 now: take what it does not")


def each_collective_of_others() -> None:
    """With operands and roots of its own, so that an option that is lost is seen."""
    group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=50))
    mine, everybody, last = torch.full((SIZE,), RANK + 1.0), torch.arange(1.0, SIZE + 1), SIZE - 1
    rows = [torch.empty(SIZE) for _ in range(SIZE)]
    expected = everybody[:, None].expand(SIZE, SIZE)
    total = float(everybody.sum())

    dist.all_reduce(biggest := mine.clone(), dist.ReduceOp.MAX, group=group)
    dist.all_reduce_coalesced(both := [mine.clone(), mine.clone()], group=group)
    assert biggest.tolist() == [SIZE] * SIZE and all(one.tolist() == [total] * SIZE for one in both)
    sparse = torch.sparse_coo_tensor(torch.tensor([[RANK]]), torch.ones(1), (SIZE,))
    dist.all_reduce(sparse, group=group)
    assert sparse.to_dense().tolist() == [1.0] * SIZE
    dist.broadcast(sent := mine.clone(), last, group=group)
    assert sent.tolist() == [SIZE] * SIZE
    dist.reduce(reduced := mine.clone(), last, dist.ReduceOp.PRODUCT, group=group)
    assert last != RANK or reduced.tolist() == [float(everybody.prod())] * SIZE

    dist.all_gather(rows, mine, group=group)
    assert torch.equal(torch.stack(rows), expected)
    dist.all_gather_into_tensor(flat := torch.empty(SIZE * SIZE), mine, group=group)
    assert torch.equal(flat.view(SIZE, SIZE), expected)
    group.allgather_coalesced(by_rank := [[torch.empty(SIZE)] for _ in range(SIZE)], [mine]).wait()
    assert torch.equal(torch.stack([one for (one,) in by_rank]), expected)
    outputs = [torch.empty(SIZE * SIZE) for _ in range(3)]
    group.allgather_into_tensor_coalesced(outputs, [mine * (at + 1) for at in range(3)]).wait()
    assert all(torch.equal(one.view(SIZE, SIZE), expected * (at + 1)) for at, one in enumerate(outputs))
    dist.gather(mine, rows if last == RANK else None, last, group=group)
    assert torch.equal(torch.stack(rows), expected)

    dist.scatter(got := torch.empty(SIZE), [one * 2 for one in rows] if last == RANK else None, last, group=group)
    assert torch.equal(got, mine * 2)
    dist.reduce_scatter(part := torch.empty(1), list(everybody.chunk(SIZE)), dist.ReduceOp.SUM, group=group)
    assert part.item() == (RANK + 1) * SIZE
    dist.reduce_scatter_tensor(part, everybody, dist.ReduceOp.MAX, group=group)
    assert part.item() == RANK + 1
    parts = [torch.empty(1) for _ in range(3)]
    group.reduce_scatter_tensor_coalesced(parts, [everybody * (at + 1) for at in range(3)]).wait()
    assert [one.item() for one in parts] == [(RANK + 1) * SIZE * (at + 1) for at in range(3)]
    dist.all_to_all_single(turned := torch.empty(SIZE), mine, group=group)
    dist.all_to_all(apart := list(torch.empty(SIZE).chunk(SIZE)), list(mine.chunk(SIZE)), group=group)
    assert torch.equal(turned, everybody) and torch.equal(torch.cat(apart), everybody)
    sizes = list(range(1, SIZE + 1))
    dist.all_to_all_single(
        ragged := torch.empty((RANK + 1) * SIZE), mine.repeat(SIZE)[: sum(sizes)], [RANK + 1] * SIZE, sizes, group=group
    )
    assert torch.equal(ragged, everybody.repeat_interleave(RANK + 1))
    dist.barrier(group)


def messages() -> None:
    work: Any = dist.isend(torch.tensor([RANK]), (RANK + 1) % SIZE)
    found = torch.empty(1, dtype=torch.int64)
    dist.recv(found, (RANK - 1) % SIZE)
    work.wait()
    assert found.item() == (RANK - 1) % SIZE


def refuses_what_the_engine_does() -> None:
    """By the same words, on all ways: at once, and where a handle waits."""
    for is_async in (False, True):
        try:
            work: Any = dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BAND, async_op=is_async)
            work.wait()
        except SMDDPError as error:
            assert "does not reduce torch.float32 with band" in str(error), error
        else:
            raise AssertionError("not refused")
    for group in (None, dist.new_group(backend="gloo")):
        try:
            dist.all_reduce(torch.ones(2), op=dist._make_nccl_premul_sum(2.0), group=group)  # type: ignore[attr-defined]
        except SMDDPError as error:
            assert "multiply the tensor" in str(error), error
        else:
            raise AssertionError("not refused")


def nccl_that_does_not_start() -> None:
    def fail(self: Any, *_: Any) -> None:
        raise RuntimeError("ncclInvalidUsage")

    begin, NCCL.__init__ = NCCL.__init__, fail
    try:
        dist.new_group(backend="smddp")
    except SMDDPNCCLError as error:
        assert str(error).startswith("NCCL does not start: ncclInvalidUsage. Fix: "), error
    else:
        raise AssertionError("not refused")
    finally:
        NCCL.__init__ = begin


def all_ranks_decide_alike() -> None:
    """Where two share a device, and where one has none: the group is the library's own, which stages tensors."""
    nccl_stand_in.install(shared=True)
    groups = [dist.new_group(backend="smddp")]
    nccl_stand_in.install()
    ours: Any = backend
    lacks = ours.local_nccl_problem
    if RANK == SIZE - 1:
        ours.local_nccl_problem = lambda: "sees no CUDA device"
    groups.append(dist.new_group(backend="smddp"))
    ours.local_nccl_problem = lacks
    for group in groups:
        assert isinstance(group, ProcessGroup)
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=group)
        assert tensor.tolist() == [SIZE] * 3


def timeouts() -> None:
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=77))
    everybody: Any = dist.group.WORLD
    engine: Any = engine_of(everybody)
    assert engine._timeout == timedelta(seconds=77)


def from_other_threads() -> None:
    """As autograd's, which runs DistributedDataParallel's buckets."""
    tensor = torch.ones(3)
    thread = threading.Thread(target=dist.all_reduce, args=(tensor,))
    thread.start()
    thread.join()
    assert tensor.tolist() == [SIZE] * 3


for check in (
    *(
        cuda_tensors_meet_no_code_of_ours,
        in_each_way_of_asking,
        the_engine_has_the_cpu,
        leaves_groups_of_others_alone,
        each_collective_of_others,
        messages,
    ),
    *(refuses_what_the_engine_does, nccl_that_does_not_start, all_ranks_decide_alike, timeouts, from_other_threads),
):
    try:
        check()
    except Exception as error:
        raise AssertionError(f"rank {RANK}: {check.__name__}: {error}") from error
    print(check.__name__)
dist.destroy_process_group()
nccl_stand_in.forget()
