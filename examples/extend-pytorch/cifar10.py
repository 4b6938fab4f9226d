"""Train a small convolutional network on CIFAR-10, data parallel on any number of ranks.

The channel "training" has the "python version" of CIFAR-10 (data_batch_1 … data_batch_5, test_batch). Without the
channel, the script generates images of the same shape: a pattern per class, with noise.
"""

from __future__ import annotations

import argparse
import os
import pickle
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import smdistributed.dataparallel.torch.distributed as dist
from smdistributed.dataparallel.torch.parallel import DistributedDataParallel

CLASSES = 10
MADE_FOR_TRAINING, MADE_FOR_TEST = 2000, 500


class Net(torch.nn.Module):
    """From images (n, 3, 32, 32), float32 from 0 to 1, to scores (n, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = torch.nn.Conv2d(3, 16, 3, padding=1)
        self.conv2 = torch.nn.Conv2d(16, 32, 3, padding=1)
        self.hidden = torch.nn.Linear(32 * 8 * 8, 64)
        self.scores = torch.nn.Linear(64, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(functional.relu(self.conv1(images)), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        return self.scores(functional.relu(self.hidden(x.flatten(1))))  # type: ignore[no-any-return]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64, help="images per rank and step (default: 64)")
    parser.add_argument("--lr", type=float, default=1e-3, help="Adam's learning rate (default: 0.001)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("SM_CHANNEL_TRAINING"))
    parser.add_argument("--model-dir", type=Path, default=os.environ.get("SM_MODEL_DIR", "model"))
    return parser.parse_args()


def make_images(count: int, seed: int) -> TensorDataset:
    """Return images in the shape of CIFAR-10: the pattern of a class, the same for every seed, with as much noise."""
    patterns = torch.rand(CLASSES, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=random)
    images = functional.interpolate(patterns, size=32)[labels]
    return TensorDataset((images + torch.rand(images.shape, generator=random)) / 2, labels)


def read_batches(directory: Path, pattern: str) -> TensorDataset:
    """Read CIFAR-10's pickles: `data` is uint8 (n, 3072), one channel after the other, and `labels` a list of n."""
    paths = sorted(directory.rglob(pattern))
    if not paths:
        raise FileNotFoundError(f"no {pattern} in {directory}. Fix: unpack the python version of CIFAR-10 there")
    batches = [pickle.loads(path.read_bytes(), encoding="bytes") for path in paths]
    pixels = np.concatenate([batch[b"data"] for batch in batches]).reshape(-1, 3, 32, 32)
    labels = np.concatenate([batch[b"labels"] for batch in batches])
    return TensorDataset(torch.from_numpy(pixels).float() / 255, torch.from_numpy(labels))


def load(data_dir: Path | None) -> tuple[TensorDataset, TensorDataset]:
    if data_dir is not None:
        return read_batches(data_dir, "data_batch_*"), read_batches(data_dir, "test_batch")
    if dist.get_rank() == 0:
        print('no channel "training": training on generated images instead of CIFAR-10', flush=True)
    return make_images(MADE_FOR_TRAINING, seed=1), make_images(MADE_FOR_TEST, seed=2)


def train_epoch(
    model: torch.nn.Module,
    loader: DataLoader[tuple[torch.Tensor, ...]],
    optimizer: torch.optim.Optimizer,
    device: torch.device,
) -> float:
    """Train on this rank's share once, and return the mean loss."""
    model.train()
    total = torch.zeros((), device=device)
    for images, labels in loader:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images.to(device)), labels.to(device))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        total += loss.detach()
    return total.item() / len(loader)


def accuracy(model: torch.nn.Module, test: TensorDataset, device: torch.device) -> float:
    model.eval()
    right = 0
    with torch.no_grad():
        for images, labels in DataLoader(test, batch_size=500):
            right += int((model(images.to(device)).argmax(1).cpu() == labels).sum())
    return right / len(test)


def main() -> None:
    arguments = parse_arguments()
    dist.init_process_group()
    rank = dist.get_rank()
    torch.manual_seed(arguments.seed)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

    training, test = load(arguments.data_dir)
    sampler: DistributedSampler[object] = DistributedSampler(training, dist.get_world_size(), rank)
    loader = DataLoader(training, batch_size=arguments.batch_size, sampler=sampler)
    model = DistributedDataParallel(Net().to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=arguments.lr)

    for epoch in range(1, arguments.epochs + 1):
        sampler.set_epoch(epoch)
        loss = train_epoch(model, loader, optimizer, device)
        if rank == 0:
            right = accuracy(model, test, device)
            print(f"epoch {epoch}/{arguments.epochs} loss {loss:.4f} test accuracy {right:.4f}", flush=True)

    if rank == 0:
        arguments.model_dir.mkdir(parents=True, exist_ok=True)
        weights = {name: value.cpu() for name, value in model.module.state_dict().items()}
        torch.save(weights, arguments.model_dir / "model.pt")


if __name__ == "__main__":
    main()
