"""Train on the digits as train.py does, with checkpoints: an interrupted job resumes exactly.

A step has the same images with any number of ranks, so a job can go on with fewer or more hosts. Runs unchanged under
`train`, mpirun and torchrun, on GPUs or CPUs, and as a single process: `python train_torch.py`.
"""

from __future__ import annotations

import math
import time

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from train import Net, accuracy, arguments_parser, join_job, read_digits, save

import shoal_checkpoint as checkpoints
from shoal_checkpoint.torch import Checkpoint


def main() -> None:
    parser = arguments_parser(__doc__)
    parser.add_argument("--global-batch", type=int, default=64, help="images in a step of all ranks (default: 64)")
    parser.add_argument("--checkpoint-dir", default=checkpoints.directory(), help="default: in a job, its directory")
    parser.add_argument("--checkpoint-every", type=int, metavar="STEPS", help="default: one checkpoint per epoch")
    arguments = parser.parse_args()
    device = join_job(arguments.seed)
    rank, world_size = dist.get_rank(), dist.get_world_size()

    training, test = read_digits(arguments.data_dir)
    loader = DataLoader(training, batch_size=arguments.batch_size, shuffle=True)
    model = DistributedDataParallel(Net().to(device))
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


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # after `model` is gone: before, torch can hang with gloo
