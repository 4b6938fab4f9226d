"""One rank of benchmarks/dataparallel.py."""

from __future__ import annotations

import time

BEGAN = time.perf_counter()

import json  # noqa: E402 (what is imported counts)
import os  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Callable, Mapping, Sequence  # noqa: E402
from contextlib import nullcontext  # noqa: E402
from functools import partial  # noqa: E402
from pathlib import Path  # noqa: E402
from statistics import median  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

BYTES = 64 << 20
SHORT_CALLS = 50  # in a round: one alone would measure how long its code takes to come back into the caches
RECORDED_STEPS = 20
WIDTH = 4096  # of the MLP's layers: three of them are 50 million parameters


def main(words: Sequence[str]) -> None:
    """Measure every case with every library."""
    from mpi4py import MPI

    import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401
    from smdistributed.core.torch.tensors import flat_of

    out, rounds, sizes = Path(words[0]), int(words[1]), [int(word) for word in words[2:]]
    mpi = MPI.COMM_WORLD
    os.environ.update(RANK=str(mpi.rank), WORLD_SIZE=str(mpi.size), LOCAL_RANK=str(mpi.rank))
    dist.init_process_group(backend="smddp")
    torch.set_num_threads(1)
    groups: dict[str, Any] = {"smddp": None, "gloo": dist.new_group(backend="gloo")}
    engine = dist.group.WORLD._engine  # type: ignore[union-attr]
    times: dict[str, dict[str, float]] = {}
    for size in sizes:
        tensor = torch.zeros(size // 4)
        runs = {name: partial(dist.all_reduce, tensor, group=group) for name, group in groups.items()}
        runs["mpi"] = partial(mpi.Allreduce, MPI.IN_PLACE, tensor.numpy())
        runs["engine"] = partial(engine.all_reduce, flat_of(tensor), "sum")
        times[f"all-reduce-{size}"] = measure(mpi, runs, rounds, calls=SHORT_CALLS if size < 1 << 20 else 1)
    if mpi.size == 2 and len(sizes) > 1:
        times.update(others(mpi, groups, rounds))
    if mpi.rank == 0:
        out.write_text(json.dumps(times))
    dist.destroy_process_group()


def others(mpi: Any, groups: dict[str, Any], rounds: int) -> dict[str, dict[str, float]]:
    """What is measured with two ranks only."""
    whole, part = torch.zeros(BYTES // 4), torch.zeros(BYTES // 4 // mpi.size)
    copy = torch.empty_like(whole)

    def copies() -> None:
        copy.copy_(whole)
        whole.copy_(copy)

    gather = {name: partial(dist.all_gather_into_tensor, whole, part, group) for name, group in groups.items()}
    scatter = {name: partial(dist.reduce_scatter_tensor, part, whole, group=group) for name, group in groups.items()}
    return {
        "copies": measure(mpi, {"smddp": copies}, rounds),
        "all-gather-64MB": measure(mpi, gather, rounds),
        "reduce-scatter-64MB": measure(mpi, scatter, rounds),
        "ddp-cnn": measure(mpi, convolutions(), rounds),
        "ddp-mlp": measure(mpi, steps(groups), max(5, rounds // 2)),
        **{f"timeline-{name}": measure(mpi, runs, rounds) for name, runs in recordings(mpi.rank).items()},
    }


def recordings(rank: int) -> dict[str, dict[str, Callable[[], None]]]:
    """Some steps with a recording from its start to its end, and without; of a CNN, and of 100 short layers."""
    from smdistributed.core import timeline

    directory = tempfile.mkdtemp()
    layers = [torch.nn.Linear(64, 64) for _ in range(100)]
    models = {
        "cnn": (cnn(), torch.randn(64, 3, 32, 32)),
        "100-layers": (torch.nn.Sequential(*layers), torch.ones(8, 64)),
    }

    def steps(network: torch.nn.Module, batch: torch.Tensor) -> dict[str, Callable[[], None]]:
        model = torch.nn.parallel.DistributedDataParallel(network)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def off() -> None:
            for _ in range(RECORDED_STEPS):
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()

        def on() -> None:
            timeline.start(directory, rank, 2)
            off()
            timeline.stop()

        return {"on": on, "off": off}

    return {name: steps(*model) for name, model in models.items()}


def cnn() -> torch.nn.Sequential:
    """A CNN for images of 32 × 32."""
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for width, wider in ((3, 32), (32, 64), (64, 128)):
        layers += [torch.nn.Conv2d(width, wider, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2)]
    return torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(128 * 4 * 4, 10))


def convolutions() -> dict[str, Callable[[], None]]:
    """A step of a CNN, with its gradients reduced and without. They are small, and its computation is long."""
    model = torch.nn.parallel.DistributedDataParallel(cnn(), gradient_as_bucket_view=True)
    images = torch.randn(64, 3, 32, 32)

    def reduced() -> None:
        model(images).square().mean().backward()
        model.zero_grad(set_to_none=False)

    def alone() -> None:
        with model.no_sync():
            reduced()

    return {"smddp": reduced, "no_sync": alone}


def steps(groups: Mapping[str, Any]) -> dict[str, Callable[[], None]]:
    """A training step of an MLP, its batch one row: its gradients take as much of the time as they can."""
    batch = torch.randn(1, WIDTH)

    def step(group: Any, reduced: bool = True) -> Callable[[], None]:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)]
        model = torch.nn.parallel.DistributedDataParallel(
            torch.nn.Sequential(*layers), process_group=group, gradient_as_bucket_view=True
        )

        def run() -> None:
            with nullcontext() if reduced else model.no_sync():
                model(batch).square().mean().backward()
            model.zero_grad(set_to_none=False)

        return run

    return {**{name: step(group) for name, group in groups.items()}, "no_sync": step(None, reduced=False)}


def measure(mpi: Any, runs: Mapping[str, Callable[[], Any]], rounds: int, calls: int = 1) -> dict[str, float]:
    """Return the median seconds of a call of each; they take turns, and a round counts for its slowest rank.

    A round is `calls` calls, one right after the other.
    """
    found: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 2):  # two to warm up
        for name, run in runs.items():
            mpi.Barrier()
            began = time.perf_counter()
            for _ in range(calls):
                run()
            seconds = max(mpi.allgather(time.perf_counter() - began)) / calls
            if turn >= 2:
                found[name].append(seconds)
    return {name: median(times) for name, times in found.items()}


def start(backend: str) -> None:
    """Print the seconds from the start of this program to the end of the first all_reduce."""
    if backend == "smddp":
        import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401
    dist.init_process_group(backend=backend)
    dist.all_reduce(torch.ones(1))
    print(time.perf_counter() - BEGAN)
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "start":
        start(sys.argv[2])
    else:
        main(sys.argv[1:])
