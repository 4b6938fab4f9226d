"""A rank: trains with a global batch that any number of ranks shares, and writes a line for each of its batches.

    elastic.py CHECKPOINTS LOG [PAUSE]

A line has the step, the weighted loss and the samples. The samples are random: workers change them.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from shoal_checkpoint.torch import Checkpoint

SAMPLES, WIDTH, GLOBAL_BATCH, MOST, EPOCHS, EVERY = 96, 16, 14, 3, 2, 2


class Samples(Dataset[Any]):
    """Each draws a random number, in a worker of the loader."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((WIDTH,), index / SAMPLES) + torch.rand(()), index


def main(checkpoints: str, log: str, pause: str = "0") -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(WIDTH, 32), torch.nn.Linear(32, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    totals = {"loss": 0.0}
    torch.manual_seed(dist.get_rank())  # all ranks get the order of rank 0
    checkpoint = Checkpoint(checkpoints, every=EVERY, model=model, optimizer=optimizer, totals=totals)
    loader = DataLoader(Samples(), MOST, shuffle=True, num_workers=1)
    with Path(f"{log}-{os.environ['RANK']}").open("a", buffering=1) as file:
        for _ in checkpoint.epochs(EPOCHS):
            for values, indices in checkpoint.batches(loader, global_batch=GLOBAL_BATCH):
                loss = (model(values).squeeze(1) - indices / SAMPLES).square().mean() * checkpoint.weight
                loss.backward()
                totals["loss"] += loss.item() / dist.get_world_size()
                file.write(f"{checkpoint.step} {loss.item() / dist.get_world_size()} {indices.tolist()}\n")
                if checkpoint.ends_step:
                    optimizer.step()
                    optimizer.zero_grad()
                    time.sleep(float(pause))
        total = torch.tensor(totals["loss"], dtype=torch.float64)
        dist.all_reduce(total)
        file.write(f"total {total.item()} []\n")
        file.write(f"weights {sum(float(each.double().abs().sum()) for each in model.parameters())} []\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
