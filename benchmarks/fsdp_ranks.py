"""One rank of benchmarks/fsdp.py: `fsdp_ranks.py OUT ROUNDS`."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from dataparallel_ranks import measure
from gpu_gpt import Size, batch_of, new_model, step_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

SHORT = Size(width=704, layers=8, words=2048, length=64, sentences=1)  # 50 million parameters
LONG = replace(SHORT, sentences=8)
LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
CASES = {"float32": (SHORT, MixedPrecisionPolicy()), "bfloat16": (SHORT, LOW), "512words": (LONG, LOW)}
"""The model with its batch, and the numbers of its collectives. Gradients and weights are stored in float32."""


def main(out: str, rounds: str) -> None:
    """Measure a step of each case on each backend; rank 0 writes seconds and losses."""
    from mpi4py import MPI

    import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401

    mpi = MPI.COMM_WORLD
    os.environ.update(RANK=str(mpi.rank), WORLD_SIZE=str(mpi.size), LOCAL_RANK=str(mpi.rank))
    dist.init_process_group(backend="smddp")
    torch.set_num_threads(1)
    groups = {"smddp": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    found: dict[str, Any] = {"parameters": sum(p.numel() for p in new_model(SHORT, torch.device("cpu")).parameters())}
    for name, case in CASES.items():
        steps = {backend: sharded(group, *case, mpi.rank) for backend, group in groups.items()}
        losses = {backend: [float(step()) for _ in range(5)] for backend, step in steps.items()}
        found[name] = {"seconds": measure(mpi, steps, int(rounds)), "losses": losses}
    if mpi.rank == 0:
        Path(out).write_text(json.dumps(found))
    dist.destroy_process_group()


def sharded(group: Any, size: Size, policy: MixedPrecisionPolicy, rank: int) -> Any:
    """A step of FSDP2, each layer sharded and compiled."""
    model, mesh = new_model(size, torch.device("cpu")), DeviceMesh.from_group(group, "cpu")
    for block in model.blocks:
        block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return step_of(model, model.parameters(), batch_of(size, rank, torch.device("cpu")), autocast=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
