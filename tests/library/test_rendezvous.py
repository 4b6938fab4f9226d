"""Devices and backends, on a machine without GPUs: each rank takes its own device, and all agree on one backend."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from smdistributed.core.launch import read_launch
from smdistributed.dataparallel.torch.rendezvous import agree_on_backend, take_device

RANK_1_OF_2 = dataclasses.replace(read_launch({}), launched=True, rank=1, local_rank=1, world_size=2)


@pytest.mark.parametrize(
    ("has_device", "backend"),
    [([True, True], "cpu:gloo,cuda:nccl"), ([True, False], "gloo"), ([False, False], "gloo")],
)
def test_all_ranks_agree_on_a_backend(has_device: list[bool], backend: str) -> None:
    store = HashStore()
    with ThreadPoolExecutor(len(has_device)) as ranks:
        agreed = list(ranks.map(lambda own: agree_on_backend(store, RANK_1_OF_2, own), has_device))
    assert agreed == [backend, backend]


def test_a_rank_takes_the_device_of_its_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert take_device(RANK_1_OF_2)
    assert taken == [1]


def test_a_rank_without_a_device_of_its_own_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.warns(UserWarning, match=r"Local rank 1 has no CUDA device of its own \(1 on this host\)"):
        assert not take_device(RANK_1_OF_2)
