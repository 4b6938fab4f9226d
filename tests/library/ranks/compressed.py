"""One rank: gradient compression, with two ranks on each of two hosts, or one."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401 (registers the backend)
from smdistributed.core.compression import COMPARED_STEPS, WARM_STEPS
from smdistributed.core.exceptions import SMDDPError
from smdistributed.core.torch.per_device import engine_of
from smdistributed.dataparallel.torch.compression import METHODS, compress_gradients

dist.init_process_group("smddp")
RANK, SIZE = dist.get_rank(), dist.get_world_size()
ENGINE: Any = engine_of(dist.group.WORLD)
ELEMENTS = 100_003  # several blocks, the last of them short, and a rest that the ranks cannot divide
STEPS = 30


def values(seed: int) -> torch.Tensor:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(seed))


def check_average() -> None:
    """One average is near, and the mean of many is much nearer. All ranks get equal bits."""
    mean, lost, total = sum(map(values, range(SIZE))) / SIZE, torch.zeros(ELEMENTS), torch.zeros(ELEMENTS)
    for step in range(20):
        found = values(RANK)
        ENGINE.average_in_int8(found, lost).wait()
        if not step:
            assert 1e-4 < (found - mean).abs().max() < 0.06
            first = found.clone()
            dist.broadcast(first, 0)
            assert torch.equal(first, found)
        total += found
    assert (total / 20 - mean).abs().max() < 0.006


def check_values_that_are_not_finite() -> None:
    """They are not lost: gradient scaling looks for them."""
    for bad in (float("nan"), float("inf")):
        found, lost = values(RANK), torch.zeros(ELEMENTS)
        found[70_000 if RANK else 0] = bad if RANK == SIZE - 1 else 1.0
        ENGINE.average_in_int8(found, lost).wait()
        assert not found.isfinite().all() and found[:10_000].isfinite().all()
        assert lost.isfinite().all()


def losses_with(method: str) -> list[float]:
    torch.manual_seed(1)
    network = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 8))
    model = DistributedDataParallel(network)
    if method:
        compress_gradients(model, method, density=0.1 if method == "top_k" else None, measure=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    generator = torch.Generator().manual_seed(RANK)
    inputs = torch.randn(64, 64, generator=generator)
    labels = inputs[:, :8].argmax(1)
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        found.append(loss.item())
    everything = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    first = everything.clone()
    dist.broadcast(first, 0)
    assert torch.equal(first, everything), method
    return found


def check_methods() -> None:
    plain = losses_with("")
    for method in METHODS:
        last = losses_with(method)[-1]
        assert plain[-1] - 0.02 < last < plain[0] - 0.8 * (plain[0] - plain[-1]), (method, last, plain[-1])
        if RANK == 0:
            print(f"trains with {method}", flush=True)


def check_that_it_is_switched_off() -> None:
    """Here, finding and sending all elements costs more than it saves."""
    model = DistributedDataParallel(torch.nn.Linear(512, 512))
    compress_gradients(model, "top_k", density=1)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2 * (WARM_STEPS + COMPARED_STEPS) + 1):
            model(torch.ones(4, 512)).sum().backward()
    said = [str(warning.message) for warning in seen if "top_k is off" in str(warning.message)]
    assert len(said) == (RANK == 0), said


def check_errors() -> None:
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    refused: tuple[tuple[str, dict[str, Any]], ...] = (
        ("int4", {}),
        ("top_k", {"density": 0}),
        ("low_rank", {"rank": 0}),
        ("int8", {"rank": 2}),
    )
    for method, options in refused:
        try:
            compress_gradients(model, method, **options)
        except SMDDPError as error:
            assert "Fix: " in str(error)
        else:
            raise AssertionError(method)


check_average()
check_values_that_are_not_finite()
check_methods()
check_that_it_is_switched_off()
check_errors()
dist.destroy_process_group()
