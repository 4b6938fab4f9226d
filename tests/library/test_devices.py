"""CUDA devices, on a machine without: each rank takes its own, and how tensors travel follows from who has which."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.library.nccl_stand_in import OLDEST, stand_in
from torch._C._distributed_c10d import HashStore

from smdistributed.core.torch import backend, devices
from smdistributed.core.torch.devices import NativeBackend
from smdistributed.core.torch.process_group import ProcessGroup
from smdistributed.dataparallel.exceptions import SMDDPError, SMDDPNCCLError

MINUTE = timedelta(minutes=1)


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: taken[-1] if taken else 0)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    # Of the second of two hosts: its rank is no number of a device there.
    for name, value in (("RANK", "3"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    return taken


def test_a_rank_takes_the_device_of_its_local_rank(two_devices: list[int]) -> None:
    devices.select_device()
    assert two_devices == [1]


def test_the_script_s_own_choice_stays(two_devices: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    two_devices.append(1)
    monkeypatch.setenv("LOCAL_RANK", "0")
    devices.select_device()
    assert two_devices == [1]


@pytest.mark.filterwarnings("error")
def test_a_rank_that_sees_its_device_alone_takes_that(two_devices: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers may set CUDA_VISIBLE_DEVICES for each rank: then its device is number 0, whatever its local rank."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    devices.select_device()
    assert two_devices == []


class Properties:
    """Of torch 2.0: no `uuid`."""

    name = "A100"


@pytest.fixture
def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)


def problem_of_two(monkeypatch: pytest.MonkeyPatch, variable: str, values: tuple[str, str]) -> str:
    """Returns why NCCL cannot carry the tensors of two ranks that differ in a variable."""
    store, other = HashStore(), HashStore()
    monkeypatch.setenv(variable, values[1])
    devices.nccl_problem(other, 0, 1)
    store.set("device-1", other.get("device-0").decode())
    monkeypatch.setenv(variable, values[0])
    return devices.nccl_problem(store, 0, 2)


SHARED = "rank 0 and rank 1 share one CUDA device, cuda:0 (A100)"


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize(
    ("visible", "problem"), [(("2", "3"), ""), (("2", "GPU-8b3c"), ""), (("3", "GPU-8b3c"), ""), (("2", "2"), SHARED)]
)
def test_devices_are_distinguished_by_the_names_that_the_host_has_for_them(
    monkeypatch: pytest.MonkeyPatch, visible: tuple[str, str], problem: str
) -> None:
    found = problem_of_two(monkeypatch, "CUDA_VISIBLE_DEVICES", visible)
    assert found.startswith(problem) and bool(found) == bool(problem)


class WithUuid(Properties):
    """Of later versions."""

    uuid = "5f5d-a1"


class Driver:
    """NVIDIA's, with device numbers only."""

    @staticmethod
    def cuDeviceGet(handle: Any, device: int) -> int:  # noqa: N802 (NVIDIA's name)
        handle._obj.value = device + 7
        return 0

    @staticmethod
    def cuDeviceGetUuid(uuid: Any, handle: Any) -> int:  # noqa: N802
        uuid[15] = handle.value
        return 0


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize("source", ["torch", "driver"])
def test_a_device_is_the_same_in_all_containers_of_a_machine(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """Each container may be a host of its own, and number the device 0. NCCL refuses two ranks on one."""
    hosts = ("algo-1", "algo-2")
    assert problem_of_two(monkeypatch, "SMDDP_HOST", hosts) == "", "nothing but its number tells devices apart"
    if source == "torch":
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: WithUuid)
    else:
        monkeypatch.setattr(ctypes, "CDLL", lambda _: Driver)
    assert problem_of_two(monkeypatch, "SMDDP_HOST", hosts).startswith(SHARED)


FakeNccl: Any = stand_in(OLDEST)
"""What a group uses whose tensors torch does not dispatch by device: an old torch's."""


def device(name: str) -> tuple[str, str, str]:
    return name, f"cuda:0 ({name})", "" if name else "sees no CUDA device"


def open_both(monkeypatch: pytest.MonkeyPatch, names: tuple[str, str]) -> list[Any]:
    """What two ranks with these devices open, or raise."""
    store, asked = HashStore(), iter(names)
    monkeypatch.setattr(devices, "_device", lambda: device(next(asked)))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)

    def open_one(rank: int) -> Any:
        try:
            return devices.open_cuda(store, rank, 2, MINUTE, None)
        except SMDDPError as error:
            return error

    with ThreadPoolExecutor(2) as ranks:
        return list(ranks.map(open_one, range(2)))


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (("gpu-a", "gpu-b"), NativeBackend),
        (("gpu-a", "gpu-a"), devices.HostStaging),
        (("gpu-a", ""), devices.HostStaging),
    ],
)
@pytest.mark.filterwarnings("ignore:CUDA tensors are copied")
def test_all_ranks_choose_alike(monkeypatch: pytest.MonkeyPatch, names: tuple[str, str], kind: type) -> None:
    assert [type(each) for each in open_both(monkeypatch, names)] == [kind, kind]


def test_copies_are_reported_with_their_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    words = (
        r"CUDA tensors are copied to the host to be reduced: rank 0 and rank 1 share one CUDA device, cuda:0 \(gpu-a\)"
    )
    with pytest.warns(UserWarning, match=words) as warned:
        open_both(monkeypatch, ("gpu-a", "gpu-a"))
    assert len(warned) == 1


def test_nccl_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object, *_: object) -> None:
        raise RuntimeError("ncclInvalidUsage")

    monkeypatch.setattr(FakeNccl, "__init__", fail)
    for refused in open_both(monkeypatch, ("gpu-a", "gpu-b")):
        assert isinstance(refused, SMDDPNCCLError)
        assert "ncclInvalidUsage" in str(refused)


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (("gpu-a", "gpu-a"), "rank 0 and rank 1 share one CUDA device, cuda:0 (gpu-a)"),
        (("", ""), "rank 0 sees no CUDA device; rank 1 sees no CUDA device"),
    ],
)
def test_nccl_is_refused_where_it_cannot_be(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, str], problem: str
) -> None:
    monkeypatch.setenv("SMDDP_ENGINE", "nccl")
    for refused in open_both(monkeypatch, names):
        assert isinstance(refused, SMDDPNCCLError)
        assert f"NCCL cannot carry the CUDA tensors of this group: {problem}. " in str(refused)
        assert "tensors are copied to the host instead" in str(refused)


def test_nccl_is_taken_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMDDP_ENGINE", "nccl")
    assert [type(each) for each in open_both(monkeypatch, ("gpu-a", "gpu-b"))] == [NativeBackend, NativeBackend]


@pytest.mark.parametrize(("has_nccl", "problem"), [(False, "has a torch without NCCL"), (True, "sees no CUDA device")])
def test_what_this_rank_lacks(monkeypatch: pytest.MonkeyPatch, has_nccl: bool, problem: str) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: has_nccl)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert devices.nccl_problem(HashStore(), 0, 1).startswith(f"rank 0 {problem}")


class Doubling:
    """A group that doubles what it is given, after a while; what it has to write into is first left to chance."""

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> Any:
        return _Work(lambda: [output.copy_(2 * inputs[0]) for output in outputs[0]])

    def allreduce(self, tensors: list[torch.Tensor], opts: object) -> Any:
        return _Work(lambda: [tensor.mul_(2) for tensor in tensors])


class _Work:
    def __init__(self, wait: Callable[[], object]) -> None:
        self.wait = wait


def test_staged_tensors_come_back() -> None:
    given, outputs = torch.tensor([1.0, 2.0]), [torch.zeros(2), torch.zeros(2)]
    work = devices.HostStaging(Doubling()).allgather([outputs], [given])
    assert [output.tolist() for output in outputs] == [[2, 4], [2, 4]]
    assert given.tolist() == [1, 2]
    assert work.is_completed()


def test_staging_writes_what_the_collective_writes_alone() -> None:
    """An input may be expanded, and autograd may need it as it is; what is reduced may need a gradient."""
    given, parameter = torch.ones(1, requires_grad=True), torch.nn.Parameter(torch.ones(2))
    squared = (given * given).sum()
    devices.HostStaging(Doubling()).allgather([[torch.zeros(3)]], [given.expand(3)])
    assert given._version == 0
    squared.backward()  # type: ignore[no-untyped-call]
    future = devices.HostStaging(Doubling()).allreduce([parameter], None).get_future()
    assert parameter.tolist() == [2, 2]
    assert future.value()[0] is parameter


def test_ranks_that_share_a_device_send_before_they_receive() -> None:
    """As batch_isend_irecv does. torch waits once more for what has ended."""
    store = HashStore()

    def exchange(rank: int) -> tuple[list[float], int]:
        group = devices.HostStaging(dist.ProcessGroupGloo(store, rank, 2, MINUTE))
        received, anybodys = torch.zeros(2, requires_grad=True), torch.zeros(1)
        works = [group.send([torch.full((2,), rank + 1.0)], 1 - rank, 7), group.send([torch.ones(1)], 1 - rank, 8)]
        works += [group.recv([received], 1 - rank, 7), group.recv_anysource([anybodys], 8)]
        for work in (*works, *works):
            assert work.wait()
        assert all(work.is_completed() for work in works)
        return [*received.tolist(), *anybodys.tolist()], works[-1]._source_rank()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(exchange, range(2))) == [([2, 2, 1], 1), ([1, 1, 1], 0)]


def test_torch_records_no_collectives_of_groups_in_python() -> None:
    """Since torch 2.15 it records all groups, and raises an error for those without a backend of its own."""
    recorded: list[object] = []
    record = backend._record_others(lambda group, *_: recorded.append(group))
    ours, others = ProcessGroup.__new__(ProcessGroup), object()
    for group in (ours, others):
        record(group, "cpu:smddp", [0])
    assert recorded == [others]
