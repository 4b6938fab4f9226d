"""CUDA devices, on a machine without: each rank takes its own, and how tensors travel follows from who has which."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from smdistributed.core.torch import devices
from smdistributed.dataparallel.exceptions import SMDDPError

MINUTE = timedelta(minutes=1)


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: taken[-1] if taken else 0)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    for name, value in (("RANK", "1"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    return taken


def test_a_rank_takes_the_device_of_its_local_rank(two_devices: list[int]) -> None:
    devices.take_device()
    assert two_devices == [1]


def test_the_script_s_own_choice_stays(two_devices: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    two_devices.append(1)
    monkeypatch.setenv("LOCAL_RANK", "0")
    devices.take_device()
    assert two_devices == [1]


def test_a_rank_without_a_device_of_its_own_says_so(two_devices: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.warns(UserWarning, match=r"Local rank 1 has no CUDA device of its own \(1 on this host\)"):
        devices.take_device()
    assert two_devices == []


class FakeNccl:
    """Stands where torch's CPU build has nothing."""

    class Options:
        _timeout = None

    def __init__(self, *_: object) -> None: ...


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
    [(("gpu-a", "gpu-b"), FakeNccl), (("gpu-a", "gpu-a"), devices.Staged), (("gpu-a", ""), devices.Staged)],
)
def test_all_ranks_choose_alike(monkeypatch: pytest.MonkeyPatch, names: tuple[str, str], kind: type) -> None:
    assert [type(each) for each in open_both(monkeypatch, names)] == [kind, kind]


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
        assert isinstance(refused, SMDDPError)
        assert f"NCCL cannot carry the CUDA tensors of this group: {problem}. " in str(refused)
        assert "SMDDP_ENGINE=auto copies" in str(refused)


def test_nccl_is_taken_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMDDP_ENGINE", "nccl")
    assert [type(each) for each in open_both(monkeypatch, ("gpu-a", "gpu-b"))] == [FakeNccl, FakeNccl]


@pytest.mark.parametrize(("has_nccl", "problem"), [(False, "has a torch without NCCL"), (True, "sees no CUDA device")])
def test_what_this_rank_lacks(monkeypatch: pytest.MonkeyPatch, has_nccl: bool, problem: str) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: has_nccl)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert problem in devices._device()[2]


class Doubling:
    """A group that doubles what it is given, after a while."""

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> Any:
        class Work:
            def wait(self) -> None:
                for output in outputs[0]:
                    output.copy_(2 * inputs[0])

        return Work()


def test_staged_tensors_come_back() -> None:
    given, outputs = torch.tensor([1.0, 2.0]), [torch.zeros(2), torch.zeros(2)]
    devices.Staged(Doubling()).allgather([outputs], [given])
    assert [output.tolist() for output in outputs] == [[2, 4], [2, 4]]
    assert given.tolist() == [1, 2]
