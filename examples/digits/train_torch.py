"""Train on the digits with torch's DistributedDataParallel on the backend `smddp`; an interrupted job resumes exactly.

The second-generation API: one import and one backend name. A step has the same images with any number of ranks, so a
job can go on with fewer or more hosts. Runs unchanged under `train`, mpirun and torchrun, on GPUs or CPUs, and as a
single process: `python train_torch.py`.
"""

from __future__ import annotations

import math
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from digits import arguments_parser, checkpoint_arguments
from digits_torch import Net, accuracy, current_device, load_digits, save
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401 (registers the backend)
from shoal_toolkit.checkpoint.torch import Checkpoint


def main() -> None:
    parser = arguments_parser(__doc__, batch_size="the most images that a rank takes at once")
    arguments = checkpoint_arguments(parser).parse_args()
    alone: dict[str, Any] = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
    dist.init_process_group(backend="smddp", **alone)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)  # one thread per rank is enough for this small network

    device = current_device()
    training, test = load_digits(arguments.data_dir)
    loader = DataLoader(training, batch_size=arguments.batch_size, shuffle=True)
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

    images, first = len(training), checkpoint.epoch
    steps = math.ceil(images / arguments.global_batch)
    training_seconds = 0.0
    for epoch in checkpoint.epochs(arguments.epochs):
        start = time.perf_counter()
        for pixels, targets in checkpoint.batches(loader, global_batch=arguments.global_batch):
            scores = model(pixels.to(device))
            loss = functional.cross_entropy(scores, targets.to(device)) * checkpoint.weight
            loss.backward()  # type: ignore[no-untyped-call]
            totals["loss"] += loss.detach() / world_size
            if checkpoint.ends_step:
                optimizer.step()
                optimizer.zero_grad()
        loss = totals.pop("loss") / steps
        totals["loss"] = torch.zeros(1, device=device)
        dist.all_reduce(loss)
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
