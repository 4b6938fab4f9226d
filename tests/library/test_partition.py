"""How a model is traced on the meta device, and cut: without ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from smdistributed.modelparallel.backend.config import check
from smdistributed.modelparallel.torch.auto_partition import auto_partition


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        while (value > 1).any():
            value = value * 0.5
        found: torch.Tensor = self.parts(value)
        return found


def stages(module: nn.Module, *args: torch.Tensor) -> dict[str, int]:
    """Of two."""
    return auto_partition(module, check({"partitions": 2}), args, {}).stages


def test_a_loop_that_waits_for_a_value_is_given_up(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smdistributed.modelparallel.torch.trace._MOST_READS", 100)
    found = stages(Halves(), torch.ones(3, 4))
    assert (found["parts.0"], found["parts.1"]) == (0, 1)
    assert "it reads more than 100 values, each taken as 1" in caplog.text
