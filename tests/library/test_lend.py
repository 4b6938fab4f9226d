"""What gloo's threads hold is back before the interpreter shuts down."""

from __future__ import annotations

import threading

import pytest
import torch

from smdistributed.dataparallel.torch import lend


@pytest.fixture(autouse=True)
def nothing_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lend, "_lent", [])


def test_an_alias_has_the_same_memory_and_is_another_object() -> None:
    tensor = torch.zeros(3, requires_grad=True)
    alias = lend.lend(tensor)
    assert alias is not tensor
    alias += 1
    assert tensor.tolist() == [1, 1, 1]


def test_only_the_last_ones_and_those_that_are_out_are_held() -> None:
    out = [lend.lend(torch.full((1,), 0.0))]
    for number in range(1, 6):
        lend.lend(torch.full((1,), float(number)))
    assert [float(alias) for alias in lend._lent] == [0, 4, 5]
    out.clear()
    lend.lend(torch.full((1,), 6.0))
    assert [float(alias) for alias in lend._lent] == [5, 6]


def test_the_exit_waits_for_what_is_out() -> None:
    holder = [lend.lend(torch.zeros(1))]
    waiting = threading.Thread(target=lend.take_back)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    holder.clear()
    waiting.join(2)
    assert not waiting.is_alive()


def test_the_exit_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lend, "_AT_MOST_SECONDS", 0.1)
    holder = [lend.lend(torch.zeros(1))]
    lend.take_back()
    assert len(holder) == 1
