"""One rank of benchmarks/scale.py."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
import torch.distributed as dist

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401


def main(words: Sequence[str]) -> None:
    """Measure all_reduce of every size."""
    from mpi4py import MPI

    out, rounds, sizes = Path(words[0]), int(words[1]), [int(word) for word in words[2:]]
    mpi = MPI.COMM_WORLD
    os.environ.update(RANK=str(mpi.rank), WORLD_SIZE=str(mpi.size), LOCAL_RANK=str(mpi.rank))
    dist.init_process_group(backend="smddp")
    seconds = {}
    for size in sizes:
        seconds[size] = measure(mpi, torch.zeros(size // 4), rounds * 10 if size < 1 << 20 else rounds)
    if mpi.rank == 0:
        out.write_text(json.dumps(seconds))
    dist.destroy_process_group()


def measure(mpi: Any, tensor: torch.Tensor, rounds: int) -> float:
    """Return the seconds of the fastest tenth: the model knows no other load. A round counts for its slowest rank."""
    found = []
    for _ in range(rounds + 2):  # two to warm up
        mpi.Barrier()
        began = time.perf_counter()
        dist.all_reduce(tensor)
        found.append(max(mpi.allgather(time.perf_counter() - began)))
    return float(quantiles(found[2:], n=10)[0])


if __name__ == "__main__":
    main(sys.argv[1:])
