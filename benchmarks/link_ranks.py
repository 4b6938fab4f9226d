"""One rank of benchmarks/link.py."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401

Measured = dict[str, float]  # seconds, and the bytes that went out of host 0 and into it


def main(words: Sequence[str]) -> None:
    """Measure every case with every library."""
    out, rounds, sizes = Path(words[0]), int(words[1]), [int(word) for word in words[2:]]
    dist.init_process_group(backend="smddp")
    gloo = dist.new_group(backend="gloo")
    found = {}
    for size in sizes:
        float32, float16 = torch.ones(size // 4), torch.ones(size // 4, dtype=torch.float16)
        runs = {
            "smddp": partial(dist.all_reduce, float32),
            "gloo": partial(dist.all_reduce, float32, group=gloo),
            "smddp-float16": partial(dist.all_reduce, float16),
        }
        found[str(size)] = measure(gloo, runs, rounds)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.destroy_process_group()


def measure(gloo: Any, runs: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, Measured]:
    """Return medians; the libraries take turns, and each round counts for its slowest rank."""
    found: dict[str, list[Measured]] = {name: [] for name in runs}
    for _ in range(rounds + 1):  # one to warm up
        for name, run in runs.items():
            found[name].append(measured(gloo, run))
    return {
        name: {key: median(once[key] for once in measurements[1:]) for key in measurements[0]}
        for name, measurements in found.items()
    }


def measured(gloo: Any, run: Callable[[], object]) -> Measured:
    """Run it once on all ranks."""
    dist.barrier(gloo)
    before = passed()
    dist.barrier(gloo)
    began = time.perf_counter()
    run()
    seconds = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX, gloo)
    after = passed()
    return {"seconds": seconds.item(), **{way: after[way] - before[way] for way in before}}


def passed() -> dict[str, int]:
    """The bytes that have passed this host's end of the wire, each way, as the kernel counts them."""
    counters = Path("/sys/class/net", os.environ["GLOO_SOCKET_IFNAME"], "statistics")
    return {way: int(counters.joinpath(f"{way}_bytes").read_text()) for way in ("tx", "rx")}


if __name__ == "__main__":
    main(sys.argv[1:])
