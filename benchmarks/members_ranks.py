"""One rank of benchmarks/members.py: for each line on standard input, it measures all cases once."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

CALLS = 20
"""Calls of a case in one measurement."""


def main(backend: str) -> None:
    """Measure at each line of standard input, until it ends."""
    if backend == "smddp":
        import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401
    dist.init_process_group(backend)
    cases = make_cases()
    for _ in sys.stdin:
        seconds = {name: measure(run) for name, run in cases.items()}
        if dist.get_rank() == 0:
            print(json.dumps(seconds), flush=True)
    dist.destroy_process_group()


def make_cases() -> dict[str, Callable[[], object]]:
    """The cases by name: all_reduce of two sizes in float32, and a training step."""
    small, large = torch.ones(256), torch.ones(4 << 20)
    layers = [torch.nn.Linear(512, 512) for _ in range(8)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    batch = torch.ones(32, 512)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()

    return {
        "all-reduce-1KB": lambda: dist.all_reduce(small),
        "all-reduce-16MB": lambda: dist.all_reduce(large),
        "ddp-step": step,
    }


def measure(run: Callable[[], object]) -> float:
    """The seconds of a call."""
    dist.barrier()
    began = time.perf_counter()
    for _ in range(CALLS):
        run()
    return (time.perf_counter() - began) / CALLS


if __name__ == "__main__":
    main(sys.argv[1])
