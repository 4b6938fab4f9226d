"""Train on the digits with torch's DistributedDataParallel on the backend `smddp`; an interrupted job resumes exactly.

The second-generation API: one import and one backend name. Runs unchanged under `train`, mpirun and torchrun, on
GPUs or CPUs, and as a single process: `python train_torch.py`.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from digits import arguments_parser, checkpoint_arguments
from digits_torch import Net, accuracy, current_device, load_digits, save, train_epoch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401 (registers the backend)
from shoal_toolkit.checkpoint.torch import Checkpoint


def main() -> None:
    arguments = checkpoint_arguments(arguments_parser(__doc__)).parse_args()
    alone: dict[str, Any] = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
    dist.init_process_group(backend="smddp", **alone)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)  # one thread per rank is enough for this small network

    device = current_device()
    training, test = load_digits(arguments.data_dir)
    sampler: DistributedSampler[object] = DistributedSampler(training, seed=arguments.seed)
    loader = DataLoader(training, batch_size=arguments.batch_size, sampler=sampler)
    model = DistributedDataParallel(Net().to(device), device_ids=[device] if device.type == "cuda" else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=arguments.lr)
    totals = {"loss": torch.zeros(1, device=device)}  # of this rank, in the current epoch
    checkpoint = Checkpoint(
        arguments.checkpoint_dir,
        every=arguments.checkpoint_every,
        model=model,
        optimizer=optimizer,
        totals=totals,
    )

    images, first = len(sampler) * world_size, checkpoint.epoch
    training_seconds = 0.0
    for epoch in checkpoint.epochs(arguments.epochs):
        start = time.perf_counter()
        train_epoch(model, checkpoint.batches(loader), optimizer, device, totals["loss"])
        loss = totals.pop("loss") / len(loader)
        totals["loss"] = torch.zeros(1, device=device)
        dist.all_reduce(loss, op=dist.ReduceOp.AVG)
        seconds = time.perf_counter() - start
        training_seconds += seconds
        if rank == 0:
            print(
                f"epoch {epoch + 1}/{arguments.epochs} loss {loss.item():.4f} {images / seconds:.0f} images/s",
                flush=True,
            )

    if rank == 0:
        metrics = {
            "test_accuracy": accuracy(model.module, test, device),
            "images_per_second": images * max(arguments.epochs - first, 0) / max(training_seconds, 1e-9),
            "training_seconds": training_seconds,
            "epochs": arguments.epochs,
            "world_size": world_size,
        }
        save(model.module.state_dict(), metrics, arguments)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
