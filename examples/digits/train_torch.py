"""Train on the digits with torch's DistributedDataParallel on the backend `smddp`; an interrupted job can resume.

The second-generation API: one import and one backend name. Runs unchanged under `train`, mpirun and torchrun, on
GPUs or CPUs, and as a single process: `python train_torch.py`.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from digits import arguments_parser
from digits_torch import Net, accuracy, current_device, load_digits, save, train_epoch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401 (registers the backend)


def main() -> None:
    parser = arguments_parser(__doc__)
    parser.add_argument(
        "--checkpoint-dir", type=Path, help="resume from checkpoint.pt in this directory, and write it after each epoch"
    )
    arguments = parser.parse_args()
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
    first = resume(arguments.checkpoint_dir, model.module, optimizer)

    images = len(sampler) * world_size
    training_seconds = 0.0
    for epoch in range(first, arguments.epochs + 1):
        sampler.set_epoch(epoch)
        torch.manual_seed(arguments.seed + epoch)  # dropout is the same after a resume
        start = time.perf_counter()
        loss = train_epoch(model, loader, optimizer, device)
        dist.all_reduce(loss, op=dist.ReduceOp.AVG)
        seconds = time.perf_counter() - start
        training_seconds += seconds
        if rank == 0:
            print(
                f"epoch {epoch}/{arguments.epochs} loss {loss.item():.4f} {images / seconds:.0f} images/s", flush=True
            )
            write_checkpoint(arguments.checkpoint_dir, epoch, model.module, optimizer)

    if rank == 0:
        metrics = {
            "test_accuracy": accuracy(model.module, test, device),
            "images_per_second": images * max(arguments.epochs + 1 - first, 0) / max(training_seconds, 1e-9),
            "training_seconds": training_seconds,
            "epochs": arguments.epochs,
            "world_size": world_size,
        }
        save(model.module.state_dict(), metrics, arguments)
    dist.destroy_process_group()


def resume(directory: Path | None, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the checkpoint, if there is one, and return the first epoch to train.

    Rank 0 reads it for all ranks, because other hosts may not have the file.
    """
    path = directory / "checkpoint.pt" if directory else None
    found: list[Any] = [None]
    if dist.get_rank() == 0 and path and path.exists():
        found = [torch.load(path, map_location="cpu")]
    dist.broadcast_object_list(found)
    if found[0] is None:
        return 1
    model.load_state_dict(found[0]["model"])
    optimizer.load_state_dict(found[0]["optimizer"])
    return int(found[0]["epoch"]) + 1


def write_checkpoint(
    directory: Path | None, epoch: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    if directory is None:
        return
    directory.mkdir(parents=True, exist_ok=True)
    state = {"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    partial = directory / "checkpoint.pt.partial"
    torch.save(state, partial)
    partial.replace(directory / "checkpoint.pt")  # an interrupt while writing leaves the previous checkpoint intact


if __name__ == "__main__":
    main()
