"""One rank: trains sharded models with the checkpoint helper, stops, and goes on with another number of ranks.

    sharded_checkpoints.py DIRECTORY BEGIN END

Trains each of KINDS from step BEGIN to END, from the checkpoint in DIRECTORY that another start has left. The losses
are those of one process. With BEGIN 0, a second training on the same ranks goes on from END, and is equal bit for bit.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401 (registers the backend)
from shoal_checkpoint.torch import Checkpoint, CheckpointError

STEPS, BATCH, WIDTH = 8, 8, 6
dist.init_process_group(backend="smddp")
RANK, SIZE = dist.get_rank(), dist.get_world_size()
torch.set_num_threads(1)


def net() -> Any:
    """Its first layer has 13 rows, no multiple of the ranks."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, 13), nn.Tanh(), nn.Linear(13, 16), nn.Tanh(), nn.Linear(16, 1)]
    return nn.Sequential(*layers)


def fsdp2() -> Any:
    model, mesh = net(), init_device_mesh("cpu", (SIZE,))
    fully_shard(model[2], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def compiled() -> Any:
    return torch.compile(fsdp2(), backend="eager")


def compiled_layers() -> Any:
    model = net()
    model[2] = torch.compile(model[2], backend="eager")
    return DistributedDataParallel(model)


def fsdp1(**options: Any) -> Any:
    given = {"use_orig_params": True, **options}
    return FullyShardedDataParallel(net(), device_id=torch.device("cpu"), **given)


def parallel() -> Any:
    """By columns and rows; with four ranks, sharded too."""
    model, ways = net(), 2 if SIZE == 4 else SIZE
    mesh = init_device_mesh("cpu", (SIZE // ways, ways), mesh_dim_names=("shard", "tensor"))
    parallelize_module(model, mesh["tensor"], {"2": ColwiseParallel(), "4": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["shard"])


def changing() -> Any:
    """Another kind in each start."""
    return {1: lambda: DistributedDataParallel(net()), 2: fsdp1, 4: fsdp2}[SIZE]()


KINDS: tuple[Callable[[], Any], ...] = (fsdp2, compiled, compiled_layers, fsdp1, parallel, changing)


def train(model: nn.Module, directory: Path | None, end: int, replicas: int, rank: int) -> list[float]:
    """Train until a step, as one of so many replicas; returns the losses."""
    optimizer = torch.optim.AdamW([{"params": [p]} for p in model.parameters()], lr=0.02)
    checkpoint = Checkpoint(directory, every=2, asynchronous=False, model=model, optimizer=optimizer)
    inputs = torch.randn(STEPS * BATCH, WIDTH, generator=torch.Generator().manual_seed(5))
    data = TensorDataset(inputs, inputs.sum(1).sin())
    loader = DataLoader(data, BATCH // replicas, sampler=DistributedSampler(data, replicas, rank, shuffle=False))
    losses: list[float] = []
    for _ in checkpoint.epochs(1):
        for samples, targets in checkpoint.batches(loader):
            if checkpoint.step == end:
                return losses
            loss = (model(samples).squeeze(1) - targets).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach().clone()
            dist.all_reduce(total, dist.ReduceOp.AVG)
            losses.append(float(total))
    return losses


def refusals() -> None:
    for make, words in (
        (lambda: fsdp1(use_orig_params=False), "use_orig_params=True"),
        (lambda: nn.Sequential(*([nn.Linear(2, 2)] * RANK), fsdp2()), "pipeline parallelism"),
    ):
        try:
            Checkpoint(None, model=make())
        except CheckpointError as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"not refused: {words}")


def main(directory: Path, begin: int, end: int) -> None:
    for kind in KINDS:
        ways = min(SIZE, 2) if kind is parallel else 1
        place = SIZE // ways, RANK // ways
        path = directory / kind.__name__
        losses = train(kind(), path, end, *place)
        if RANK == 0:
            print(f"losses of {kind.__name__}: {losses}", flush=True)
        if begin == 0:
            dist.barrier()
            copy = path.with_name(f"{kind.__name__}-copy")
            if RANK == 0:
                shutil.copytree(path, copy)
            dist.barrier()
            assert train(kind(), copy, STEPS, *place) == train(kind(), None, STEPS, *place)[end:], kind
    if SIZE > 1:
        refusals()
    else:
        print(f"losses of one_process: {train(net(), None, STEPS, 1, 0)}", flush=True)
    dist.destroy_process_group()


main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
