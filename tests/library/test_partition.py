"""How a model is traced on the meta device, and cut: without ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from smdistributed.modelparallel.backend.config import check
from smdistributed.modelparallel.torch.plan.auto_partition import auto_partition


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        while (value > 1).any():
            value = value * 0.5
        found: torch.Tensor = self.parts(value)
        return found


class Head(nn.Module):
    """Its weight is another's, so that it costs nothing itself."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight, self.norm = weight, nn.LayerNorm(4)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(value) @ self.weight.T
        return found


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 4)
        self.body = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        self.head = Head(self.embed.weight)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value.numpy()  # has no trace
        found: torch.Tensor = self.head(self.body(self.embed(value)))
        return found


class Reaches(nn.Module):
    """Uses tensors of modules that it does not call for that. All have one that is a buffer of each."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.parts = nn.Sequential(*(nn.BatchNorm1d(4) for _ in range(6)))
        shared = torch.ones(4)
        for part in (self, *self.parts):
            part.register_buffer("shared", shared)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        last: Any = self.parts[5]
        value = value * self.get_buffer("shared")
        if self.how == "nested":
            value = value * torch.cat([last.weight])
        elif self.how == "buffer":
            value = value * last.running_var
        elif self.how == "dtype":
            value = value.to(last.running_var.dtype)
        found: torch.Tensor = self.parts(value)
        return found


class Caches(nn.Module):
    """Keeps tensors of its forward, as GPT-J of transformers keeps its table of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.table, self.cache = torch.ones(4), dict[int, torch.Tensor]()

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.table = self.table.to(value.device)
        self.register_buffer("seen", value)
        value = value * self.cache.setdefault(len(value), torch.ones(4, device=value.device))
        found: torch.Tensor = self.parts(value * self.table)
        return found


def stages(module: nn.Module, *args: torch.Tensor) -> dict[str, int]:
    """Of two."""
    return auto_partition(module, check({"partitions": 2}), args, {}).stages


def test_a_loop_that_waits_for_a_value_is_given_up(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smdistributed.modelparallel.torch.plan.trace._MAX_READS", 100)
    found = stages(Halves(), torch.ones(3, 4))
    assert (found["parts.0"], found["parts.1"]) == (0, 1)
    assert "it reads more than 100 values, each taken as 1" in caplog.text


def test_a_container_with_the_weight_of_another_is_with_it() -> None:
    found = stages(Tied(), torch.zeros(2, dtype=torch.long))
    assert found["head"] == found["embed"]


@pytest.mark.parametrize(("how", "last"), [("nothing", 1), ("dtype", 1), ("nested", 0), ("buffer", 0)])
def test_who_uses_tensors_of_another_module_is_with_it(how: str, last: int) -> None:
    found = stages(Reaches(how), torch.ones(3, 4))
    assert (found[""], found["parts.5"]) == (0, last)
    assert set(found.values()) == {0, 1}


def test_a_trace_leaves_no_tensor_without_memory_in_a_module() -> None:
    module = Caches()
    table = module.table
    stages(module, torch.ones(3, 4))
    assert module.table is table
    assert not module.cache and not dict(module.named_buffers())
    assert module(torch.ones(3, 4)).device.type == "cpu"
