"""Train the digits with torch's FullyShardedDataParallel on the backend `smddp`: each rank keeps a part of the model.

Parameters, gradients and the optimizer's state are spread over the ranks; a layer's parameters come together while it
computes. Runs as it is under `train`, mpirun and torchrun, on GPUs and without, and alone: `python train_fsdp.py`.
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

WRAP_PARAMETERS = 4096  # layers from this size on are gathered one by one; a large model takes a larger one


def main() -> None:
    arguments = arguments_parser(__doc__).parse_args()
    alone: dict[str, Any] = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
    dist.init_process_group(backend="smddp", **alone)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)  # the network is small: the cores are for the ranks

    device = current_device()
    training, test = load_digits(arguments.data_dir)
    sampler: DistributedSampler[object] = DistributedSampler(training, seed=arguments.seed)
    loader = DataLoader(training, batch_size=arguments.batch_size, sampler=sampler)
    model = FullyShardedDataParallel(
        Net(),
        auto_wrap_policy=partial(size_based_auto_wrap_policy, min_num_params=WRAP_PARAMETERS),
        device_id=device,
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=arguments.lr)  # after wrapping: it holds this rank's part

    images = len(sampler) * world_size
    training_seconds = 0.0
    for epoch in range(1, arguments.epochs + 1):
        sampler.set_epoch(epoch)
        start = time.perf_counter()
        loss = train_epoch(model, loader, optimizer, device)
        dist.all_reduce(loss, op=dist.ReduceOp.AVG)
        seconds = time.perf_counter() - start
        training_seconds += seconds
        if rank == 0:
            print(
                f"epoch {epoch}/{arguments.epochs} loss {loss.item():.4f} {images / seconds:.0f} images/s", flush=True
            )

    # Every rank takes part where the whole model is needed: rank 0 alone would wait for the others' parts for ever.
    test_accuracy = accuracy(model, test, device)
    whole = FullStateDictConfig(offload_to_cpu=device.type == "cuda", rank0_only=True)  # torch fails to offload a CPU's
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
