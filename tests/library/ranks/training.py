"""One rank: train a small model on this rank's share of a batch, and write the weights to OUT/<rank>.npz.

Arguments: OUT, and MICROBATCHES: the pieces that a share is trained in, all but the last under `no_sync()`. Rank 0 also
trains the same model unwrapped on whole batches, into OUT/expected.npz. At the end it evaluates alone a model with
buffers, which must start no collective, and all ranks compare the buffers of a model in training.
"""

from __future__ import annotations

import contextlib
import sys

import numpy as np
import torch

import smdistributed.dataparallel.torch.distributed as dist
from smdistributed.dataparallel.torch.parallel import DistributedDataParallel
from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel as SameByItsLongName

STEPS, BATCH = 6, 24
OUT, MICROBATCHES = sys.argv[1], int(sys.argv[2])


def new_model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(10, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)).double()


def train(model: torch.nn.Module, first: int, stride: int, microbatches: int) -> None:
    """SGD on the samples `first`, `first + stride`, … of every batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    random = np.random.RandomState(0)
    for _ in range(STEPS):
        images = torch.from_numpy(random.standard_normal((BATCH, 10)))[first::stride]
        labels = torch.from_numpy(random.randint(0, 3, BATCH))[first::stride]
        optimizer.zero_grad()
        pieces = list(zip(images.chunk(microbatches), labels.chunk(microbatches)))
        for number, (inputs, targets) in enumerate(pieces, 1):
            with model.no_sync() if number < len(pieces) else contextlib.nullcontext():  # type: ignore[operator]
                loss = torch.nn.functional.cross_entropy(model(inputs), targets) / len(pieces)
                loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def save(model: torch.nn.Module, name: str) -> None:
    np.savez(f"{OUT}/{name}.npz", *[parameter.detach().numpy() for parameter in model.parameters()])


def evaluate_alone() -> None:
    model = DistributedDataParallel(torch.nn.BatchNorm1d(4))
    model(torch.randn(8, 4)).sum().backward()
    model.eval()
    if dist.get_rank() == 0:
        with torch.no_grad():
            for _ in range(3):
                model(torch.randn(8, 4))
    highest = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    assert highest.item() == dist.get_world_size() - 1, "evaluation on rank 0 started a collective"


def buffers_follow_the_first_rank() -> None:
    """Each forward begins with rank 0's buffers: running means of other data end equal."""
    model = DistributedDataParallel(torch.nn.BatchNorm1d(4))
    data = torch.randn(8, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    model(data).sum().backward()
    with torch.no_grad():
        model(torch.zeros(8, 4))
    mean = model.module.running_mean
    found = [torch.empty_like(mean) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mean)
    assert all(torch.equal(found[0], other) for other in found), found


assert DistributedDataParallel is SameByItsLongName
dist.init_process_group()
rank = dist.get_rank()
wrapped = DistributedDataParallel(new_model(seed=rank))  # other first weights on every rank: wrapping makes them equal
train(wrapped, rank, dist.get_world_size(), MICROBATCHES)
save(wrapped.module, str(rank))
if rank == 0:
    unwrapped = new_model(seed=0)
    save(unwrapped, "untrained")
    train(unwrapped, 0, 1, microbatches=1)
    save(unwrapped, "expected")
evaluate_alone()
buffers_follow_the_first_rank()
