"""A rank: trains a small network data parallel, and writes a line for each step: its number, epoch, loss and samples.

    resuming.py CHECKPOINTS LOG [--OPTION VALUE]

Everything in it is random: dropout, the order, and the samples, which workers of the loader change.
"""

from __future__ import annotations

import argparse
import atexit
import os
import random
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from shoal_checkpoint.torch import Checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator

SAMPLES, WIDTH = 96, 16


class Samples(Dataset[Any]):
    """Each draws from all three generators."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = random.random() + np.random.random() + torch.rand(())
        return torch.full((WIDTH,), index / SAMPLES) + noise, index


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoints")
    parser.add_argument("log")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--every", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64, help="of the hidden layer")
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
    parser.add_argument("--kill-at", type=int, help="kill this process after this step")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    if given.backend == "smddp":
        import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401
    if "RANK" in os.environ:
        dist.init_process_group(given.backend)
    rank = int(os.environ.get("RANK", "0"))
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)
    model: Any = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, given.width),
        torch.nn.Dropout(0.3),
        torch.nn.BatchNorm1d(given.width),
        torch.nn.Linear(given.width, 1),
    ).to(given.device)
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    data, totals = Samples(), {"loss": 0.0}
    sampler: Any = DistributedSampler(data) if dist.is_initialized() else None
    loader = DataLoader(data, given.batch_size, shuffle=sampler is None, sampler=sampler, num_workers=given.workers)
    checkpoint = Checkpoint(
        given.checkpoints, every=given.every, model=model, optimizer=optimizer, scheduler=scheduler, totals=totals
    )
    with Path(f"{given.log}-{rank}").open("a", buffering=1) as log:
        for epoch in checkpoint.epochs(given.epochs):
            for step, loss, indices in train(checkpoint, loader, model, optimizer):
                totals["loss"] += loss
                log.write(f"{step} {epoch} {loss.hex()} {totals['loss'].hex()} {indices}\n")
                if step == given.kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(given.pause)
            scheduler.step()
        log.write(f"weights {[float(each.double().sum()).hex() for each in model.parameters()]}\n")


def train(checkpoint: Checkpoint, loader: Any, model: Any, optimizer: Any) -> Iterator[tuple[int, float, list[int]]]:
    for values, indices in checkpoint.batches(loader):
        optimizer.zero_grad()
        values, wanted = (each.to(next(model.parameters()).device) for each in (values, indices / SAMPLES))
        loss = (model(values).squeeze(1) - wanted).square().mean()
        loss.backward()
        optimizer.step()
        yield checkpoint.step, loss.item(), indices.tolist()


if __name__ == "__main__":
    main()
    if torch.__version__.startswith("2.0."):  # a thread of its gloo that still works at the end can abort the process
        atexit.register(os._exit, 0)  # after all threads of Python
