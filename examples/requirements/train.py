"""Classify handwritten digits by patches, data parallel. einops, which makes the patches, is in requirements.txt."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from einops.layers.torch import Rearrange
from sklearn.datasets import load_digits
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401 (registers the backend)


def make_model() -> torch.nn.Module:
    """Return a model from images (n, 8, 8), float32 from 0 to 1, to scores (n, 10)."""
    return torch.nn.Sequential(
        Rearrange("n (rows height) (columns width) -> n (rows columns) (height width)", height=2, width=2),
        torch.nn.Linear(4, 8),
        torch.nn.ReLU(),
        Rearrange("n patches features -> n (patches features)"),
        torch.nn.Linear(16 * 8, 10),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--model-dir", type=Path, default=os.environ.get("SM_MODEL_DIR", "model"))
    arguments = parser.parse_args()
    if "RANK" not in os.environ:  # no launcher
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("smddp")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # one thread per rank is enough for this small model

    digits = load_digits()
    images, labels = torch.tensor(digits.images).float() / 16, torch.tensor(digits.target)
    test = torch.arange(len(labels)) % 5 == 0
    share = torch.nonzero(~test).flatten()[rank::world_size]
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(1, arguments.epochs + 1):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images[share]), labels[share])
        loss.backward()
        optimizer.step()
        if rank == 0 and epoch % 10 == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)

    if rank == 0:
        with torch.no_grad():
            right = (model.module(images[test]).argmax(1) == labels[test]).float().mean().item()
        print(f"test accuracy {right:.4f} on {world_size} rank(s)", flush=True)
        arguments.model_dir.mkdir(parents=True, exist_ok=True)
        torch.save(model.module.state_dict(), arguments.model_dir / "model.pt")


if __name__ == "__main__":
    main()
