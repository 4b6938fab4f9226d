"""Train on the digits with torch's FullyShardedDataParallel on the backend `smddp`.

Each rank keeps a part of the parameters, gradients and optimizer state. The parameters of a layer are gathered while it
computes. Runs unchanged under `train`, mpirun and torchrun, on GPUs or CPUs, and as a single process:
`python train_fsdp.py`.
"""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from digits import arguments_parser
from digits_torch import Net, accuracy, current_device, load_digits, save, train_epoch
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401 (registers the backend)

WRAP_PARAMETERS = 4096  # the smallest layers to gather on their own; use more for a large model


def main() -> None:
    arguments = arguments_parser(__doc__).parse_args()
    alone: dict[str, Any] = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
    dist.init_process_group(backend="smddp", **alone)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)  # one thread per rank is enough for this small network

    device = current_device()
    training, test = load_digits(arguments.data_dir)
    sampler: DistributedSampler[object] = DistributedSampler(training, seed=arguments.seed)
    loader = DataLoader(training, batch_size=arguments.batch_size, sampler=sampler)
    model = FullyShardedDataParallel(
        Net(),
        auto_wrap_policy=partial(size_based_auto_wrap_policy, min_num_params=WRAP_PARAMETERS),
        device_id=device,
    )
    optimizer = torch.optim.Adam(
        model.parameters(), lr=arguments.lr
    )  # after wrapping, so that it holds only this rank's part

    images = len(sampler) * world_size
    training_seconds = 0.0
    for epoch in range(1, arguments.epochs + 1):
        sampler.set_epoch(epoch)
        start = time.perf_counter()
        loss = torch.zeros(1, device=device)
        train_epoch(model, loader, optimizer, device, loss)
        loss /= len(loader)
        dist.all_reduce(loss, op=dist.ReduceOp.AVG)
        seconds = time.perf_counter() - start
        training_seconds += seconds
        if rank == 0:
            print(
                f"epoch {epoch}/{arguments.epochs} loss {loss.item():.4f} {images / seconds:.0f} images/s", flush=True
            )

    # All ranks must take part if the whole model is needed: otherwise rank 0 would wait forever for the others' parts.
    test_accuracy = accuracy(model, test, device)
    whole = FullStateDictConfig(offload_to_cpu=device.type == "cuda", rank0_only=True)  # on a CPU, torch cannot offload
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, whole):
        weights = model.state_dict()
    if rank == 0:
        metrics = {
            "test_accuracy": test_accuracy,
            "images_per_second": images * arguments.epochs / training_seconds,
            "training_seconds": training_seconds,
            "epochs": arguments.epochs,
            "world_size": world_size,
        }
        save(weights, metrics, arguments)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
