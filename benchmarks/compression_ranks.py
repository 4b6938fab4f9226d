"""One rank of benchmarks/compression.py."""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from gpu_gpt import GPT, Size, batch_of
from link_ranks import passed
from sklearn.datasets import load_digits
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401
from smdistributed.dataparallel.torch.compression import METHODS, compress_gradients

SIZE = Size(256, layers=4, words=1024, length=64, sentences=2)  # 3.7 million parameters, 15 MB of gradients
SMALL = Size(64, layers=2, words=64, length=32, sentences=16)
WARM = 20  # steps, in which compression measures itself
STEPS, EPOCHS = 300, 8
Model = DistributedDataParallel


def main(words: Sequence[str]) -> None:
    """Measure speed or accuracy."""
    out, what, count = Path(words[0]), words[1], int(words[2])
    warnings.simplefilter("ignore")
    dist.init_process_group("smddp")
    found = {"speed": speed, "accuracy": accuracy}[what](count)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.destroy_process_group()


def speed(rounds: int) -> dict[str, dict[str, float]]:
    """Seconds and sent bytes of a step, by way."""
    gloo = dist.new_group(backend="gloo")
    ways: dict[str, tuple[Any, Callable[[Model], object]]] = {
        "none": (None, lambda model: None),
        "int8": (None, lambda model: compress_gradients(model, "int8")),
        "low_rank": (None, lambda model: compress_gradients(model, "low_rank")),
        "gloo-none": (gloo, lambda model: None),
        "gloo-fp16": (gloo, lambda model: model.register_comm_hook(gloo, fp16_compress_hook)),
        "gloo-powersgd": (gloo, lambda model: model.register_comm_hook(_powersgd(gloo), powerSGD_hook)),
    }
    # On gloo, PowerSGD of several buckets ends the process: callbacks start collectives in another order on each rank.
    steps = {name: new_step(group, prepare, one_bucket="power" in name) for name, (group, prepare) in ways.items()}
    for step in steps.values():
        for _ in range(WARM):
            step()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    sent: dict[str, float] = {}
    for _ in range(rounds):
        for name, step in steps.items():
            took, sent[name] = timed(step)
            seconds[name].append(took)
    return {"seconds": {name: median(times) for name, times in seconds.items()}, "bytes": sent}


def _powersgd(group: Any) -> PowerSGDState:
    return PowerSGDState(group, matrix_approximation_rank=4, start_powerSGD_iter=2)


def new_step(group: Any, prepare: Callable[[Model], object], one_bucket: bool) -> Callable[[], None]:
    """A step of a model of its own."""
    torch.manual_seed(0)
    model = Model(GPT(SIZE), process_group=group, bucket_cap_mb=100 if one_bucket else None)
    prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = batch_of(SIZE, dist.get_rank(), torch.device("cpu"))

    def step() -> None:
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()

    return step


def timed(step: Callable[[], None]) -> tuple[float, float]:
    """The seconds of the slowest rank, and the bytes that this host has sent."""
    dist.barrier()
    before, began = passed()["tx"], time.perf_counter()
    step()
    seconds = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
    sent = passed()["tx"] - before
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item(), sent


def accuracy(seeds: int) -> dict[str, dict[str, list[float]]]:
    """The last loss of the GPT, and the errors of the digits in percent: by data, method and seed."""
    trained = {"gpt": train_gpt, "digits": train_digits}
    return {
        data: {method: [train(method, seed) for seed in range(seeds)] for method in ("none", *METHODS)}
        for data, train in trained.items()
    }


def compressed(network: torch.nn.Module, method: str) -> Model:
    """The network with its gradients compressed from the first step on."""
    model = Model(network)
    if method != "none":
        compress_gradients(model, method, measure=False)
    return model


def train_gpt(method: str, seed: int) -> float:
    """The mean loss of the last 50 steps, on sentences that no step had before."""
    torch.manual_seed(seed)
    model = compressed(GPT(SMALL), method)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for number in range(STEPS):
        optimizer.zero_grad()
        loss = model(batch_of(SMALL, dist.get_world_size() * (seed * STEPS + number) + dist.get_rank(), CPU))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    last = torch.stack(losses[-50:]).mean()
    dist.all_reduce(last, dist.ReduceOp.AVG)
    return last.item()


CPU = torch.device("cpu")


def train_digits(method: str, seed: int) -> float:
    """The share of wrong answers, in percent, for the 360 digits that were not trained with."""
    torch.manual_seed(seed)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images))
    mine, test = order[360 + dist.get_rank() :: dist.get_world_size()], order[:360]
    network = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    model = compressed(network, method)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(EPOCHS):
        for some in mine[: len(mine) // 16 * 16].split(16)[:44]:  # type: ignore[no-untyped-call]  # as many on each rank
            optimizer.zero_grad()
            functional.cross_entropy(model(images[some]), labels[some]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    with torch.no_grad():
        wrong = network(images[test]).argmax(1) != labels[test]
    return float(100 * wrong.float().mean())


if __name__ == "__main__":
    main(sys.argv[1:])
