"""What is done to all gradients of a stage waits for its GPU once, and mixes none of them with tensors on the host."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from shoal_toolkit.hooks.idle import wait_for_idle_threads
from smdistributed.modelparallel.torch.script import buckets, half_precision
from smdistributed.modelparallel.torch.script.gradients import clip_gradients
from smdistributed.modelparallel.torch.script.half_precision import LossScale, MasterWeights

COUNT = 30


class Device(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Stands in for a GPU: some tensors are on it, and so is what is computed from them. It counts who waits for it."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waits = 0
        self._there = list(tensors)  # kept: an id is another tensor's later

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, torch.Tensor)]
        there = [any(value is one for one in self._there) for value in given]
        if any(there):
            strangers = [value for value, is_there in zip(given, there) if not is_there and value.dim()]
            assert not strangers, f"Expected all tensors to be on the same device: {func}"
            self.waits += func is torch.ops.aten._local_scalar_dense.default
        made = func(*args, **kwargs)
        if any(there):
            self._there += [value for value in tree_flatten(made)[0] if isinstance(value, torch.Tensor)]
        return made


@pytest.fixture
def reduced(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the stage, which is alone, gives to collectives."""
    given: list[Any] = []
    monkeypatch.setattr(half_precision, "dist", SimpleNamespace(all_reduce=given.append))
    monkeypatch.setattr(half_precision, "device_of", lambda _: torch.device("cpu"))

    def never(_: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a copy to the host waits for the device")

    monkeypatch.setattr(torch.Tensor, "cpu", never)
    return given


def alone(part: float) -> list[float]:
    return [part]


def parameters(value: float = 1.0, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    """Of several shapes, one of them empty, with gradients of that value."""
    made = [torch.nn.Parameter(torch.zeros(size % 7, 3, dtype=dtype)) for size in range(COUNT)]
    for parameter in made:
        parameter.grad = torch.full_like(parameter, value)
    return made


def gradients_of(given: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    return [parameter.grad for parameter in given if parameter.grad is not None]


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_clipping_waits_once(reduced: list[Any], norm_type: float) -> None:
    given, expected = parameters(2.0), parameters(2.0)
    with Device(gradients_of(given)) as device:
        norm = clip_gradients(given, 1.0, norm_type, alone)
    in_torch = torch.nn.utils.clip_grad_norm_([p for p in expected if p.numel()], 1.0, norm_type)
    assert device.waits == 1
    assert norm == pytest.approx(float(in_torch))
    for one, other in zip(gradients_of(given), gradients_of(expected)):
        torch.testing.assert_close(one, other)


def test_a_norm_in_half_precision_does_not_overflow() -> None:
    given = parameters(300.0, torch.float16)
    elements = sum(parameter.numel() for parameter in given)
    assert clip_gradients(given, 1.0, 2.0, alone) == pytest.approx(300.0 * math.sqrt(elements), rel=1e-3)


@pytest.mark.parametrize(("broken", "overflows"), [(None, False), (float("inf"), True), (float("nan"), True)])
def test_overflows_are_looked_for_once(reduced: list[Any], broken: float | None, overflows: bool) -> None:
    given = parameters(8.0)
    if broken is not None:
        gradients_of(given)[COUNT // 2][0, 0] = broken
    weights = MasterWeights(torch.optim.SGD(given, 0.1), False, LossScale(1.0, True, {"init_scale": 4.0}), lambda: None)
    with Device(gradients_of(given)) as device:
        weights.unscale()
    assert device.waits == 1
    assert (weights.overflow, [float(one) for one in reduced]) == (overflows, [float(overflows)])
    assert float(gradients_of(given)[1][0, 0]) == 2.0


@pytest.fixture
def everybody() -> Iterator[Any]:
    """The group of all ranks, of this process alone; another test may have made it, as smp.init does."""
    made_here = not torch.distributed.is_initialized()
    if made_here:
        torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    if made_here:
        wait_for_idle_threads()  # torch 2.0 can hang otherwise: see shoal_toolkit.hooks.imports
        torch.distributed.destroy_process_group()


def test_parameters_are_broadcast_in_buckets(monkeypatch: pytest.MonkeyPatch, everybody: Any) -> None:
    sent: list[int] = []
    original = torch.distributed._broadcast_coalesced  # type: ignore[attr-defined]

    def counted(group: Any, tensors: list[torch.Tensor], size: int, source: int) -> None:
        sent.append(len(tensors))
        original(group, tensors, size, source)

    monkeypatch.setattr(torch.distributed, "_broadcast_coalesced", counted)
    given = parameters(3.0)
    buckets.broadcast_in_buckets(given, everybody, 0)
    buckets.broadcast_in_buckets([], everybody, 0)
    assert sent == [sum(1 for parameter in given if parameter.numel())]
