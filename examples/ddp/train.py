"""Train a small network with torch's DistributedDataParallel. Copy this file to start your own script.

All of it is plain torch, except one import, which registers the backend `smddp`. Without that package it uses nccl
or gloo. The script runs under `shoal run`, torchrun and mpirun, and alone, and continues from its checkpoint.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

try:
    import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401 (registers the backend)

    BACKEND = "smddp"
except ImportError:
    BACKEND = "nccl" if torch.cuda.is_available() else "gloo"

BASE_DIR = os.environ.get("SAGEMAKER_BASE_DIR", "/opt/ml" if "SM_MODEL_DIR" in os.environ else ".")


class Net(nn.Module):
    """From measurements of a tumour (n, 30) to the logit of "benign" (n,). Replace it with your model."""

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(30))  # buffers are saved with the model
        self.register_buffer("std", torch.ones(30))
        self.layers = nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.layers((features - self.mean) / self.std).squeeze(1)


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Return training and test data. Replace it, and read from os.environ["SM_CHANNEL_TRAINING"]."""
    features, labels = load_breast_cancer(return_X_y=True)
    data = TensorDataset(torch.tensor(features).float(), torch.tensor(labels).float())
    return TensorDataset(*data[100:]), TensorDataset(*data[:100])


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write a file that is complete or not there at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path.with_suffix(".partial"))
    path.with_suffix(".partial").replace(path)


def main(args: argparse.Namespace) -> None:
    if "RANK" not in os.environ:  # no launcher
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group(args.backend)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    torch.manual_seed(args.seed)

    training, test = load_data()
    sampler = DistributedSampler(training, seed=args.seed)
    loader = DataLoader(training, args.batch_size, sampler=sampler)
    net = Net()
    net.mean, net.std = training.tensors[0].mean(0), training.tensors[0].std(0)
    model = DistributedDataParallel(net.to(device))
    optimizer = torch.optim.Adam(model.parameters(), args.lr)

    # Rank 0 reads the checkpoint and sends it to all, so only its host needs the file.
    path = args.checkpoint_dir / "checkpoint.pt"
    found = [torch.load(path, map_location="cpu") if rank == 0 and path.exists() else None]
    dist.broadcast_object_list(found)
    checkpoint: Any = found[0] or {"epoch": 0}
    if found[0]:
        net.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])

    for epoch in range(checkpoint["epoch"], args.epochs):
        sampler.set_epoch(epoch)  # another order in each epoch
        total = torch.zeros(1, device=device)
        for features, labels in loader:
            optimizer.zero_grad()
            loss = binary_cross_entropy_with_logits(model(features.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch + 1}/{args.epochs} loss {total.item() / len(loader) / world_size:.4f}", flush=True)
            state = {"epoch": epoch + 1, "model": net.state_dict(), "optimizer": optimizer.state_dict()}
            save_checkpoint(path, state)

    if rank == 0:
        features, labels = test.tensors
        with torch.no_grad():
            accuracy = ((net(features.to(device)) > 0).cpu() == labels).float().mean().item()
        print(f"test accuracy {accuracy:.3f}, world size {world_size}, backend {args.backend}")
        args.model_dir.mkdir(parents=True, exist_ok=True)
        torch.save(net.cpu().state_dict(), args.model_dir / "model.pt")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="samples per rank and step")
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default=BACKEND, help="of torch.distributed, such as gloo")
    parser.add_argument("--checkpoint-dir", type=Path, default=Path(BASE_DIR, "checkpoints"))
    parser.add_argument("--model-dir", type=Path, default=os.environ.get("SM_MODEL_DIR", "model"))
    main(parser.parse_args())
    dist.destroy_process_group()  # after `model` is gone: before, torch can hang with gloo
