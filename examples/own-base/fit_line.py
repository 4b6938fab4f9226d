"""Fit a line to points that are divided between ranks: the smallest test of ranks, communication and gradients."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401 (registers the backend)


def main() -> None:
    if "RANK" not in os.environ:  # no launcher
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("smddp")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    total = torch.tensor(rank + 1)
    dist.all_reduce(total)

    x = torch.linspace(-1, 1, 64)[rank::world_size, None]
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(100):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), 3 * x - 1)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if rank == 0 and step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)

    if rank == 0:
        slope, height = (parameter.item() for parameter in model.parameters())
        print(f"sum over {world_size} ranks: {total.item()}")
        print(f"y = {slope:.2f} x {height:+.2f}", flush=True)


if __name__ == "__main__":
    main()
