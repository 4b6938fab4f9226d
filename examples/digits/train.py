"""Train a small convolutional network on 1,797 handwritten digits, data parallel on any number of ranks.

With the first-generation API, `smdistributed.dataparallel.torch`. Runs unchanged under `train`, mpirun and
torchrun, on GPUs or CPUs, and as a single process: `python train.py`.
"""

from __future__ import annotations

import time

import torch
from digits import arguments_parser
from digits_torch import Net, accuracy, current_device, load_digits, save, train_epoch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import smdistributed.dataparallel.torch.distributed as dist
from smdistributed.dataparallel.torch.parallel import DistributedDataParallel


def main() -> None:
    arguments = arguments_parser(__doc__).parse_args()
    dist.init_process_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)  # one thread per rank is enough for this small network

    device = current_device()
    training, test = load_digits(arguments.data_dir)
    sampler: DistributedSampler[object] = DistributedSampler(
        training, num_replicas=world_size, rank=rank, seed=arguments.seed
    )
    loader = DataLoader(training, batch_size=arguments.batch_size, sampler=sampler)
    model = DistributedDataParallel(Net().to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=arguments.lr)

    images = len(sampler) * world_size
    training_seconds = 0.0
    for epoch in range(1, arguments.epochs + 1):
        sampler.set_epoch(epoch)
        start = time.perf_counter()
        loss = torch.zeros(1, device=device)
        train_epoch(model, loader, optimizer, device, loss)
        loss /= len(loader)
        dist.all_reduce(loss, op=dist.ReduceOp.AVERAGE)
        seconds = time.perf_counter() - start
        training_seconds += seconds
        if rank == 0:
            print(
                f"epoch {epoch}/{arguments.epochs} loss {loss.item():.4f} {images / seconds:.0f} images/s", flush=True
            )

    if rank == 0:
        metrics = {
            "test_accuracy": accuracy(model, test, device),
            "images_per_second": images * arguments.epochs / training_seconds,
            "training_seconds": training_seconds,
            "epochs": arguments.epochs,
            "world_size": world_size,
        }
        save(model.module.state_dict(), metrics, arguments)


if __name__ == "__main__":
    main()
