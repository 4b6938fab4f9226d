"""What the training scripts here share: the network, the digits, one pass over them, and the files a job leaves.

Nothing in it is distributed: that is what the scripts show.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

GREATEST_PIXEL = 16
HELD_OUT = 5  # every fifth image of each digit is for testing


class Net(torch.nn.Module):
    """Images (n, 1, 8, 8), float32 from 0 to 1, to scores (n, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = torch.nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = torch.nn.Conv2d(16, 32, 3, padding=1)
        self.dropout = torch.nn.Dropout(0.25)
        self.hidden = torch.nn.Linear(32 * 4 * 4, 64)
        self.scores = torch.nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.conv1(images))
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        x = functional.relu(self.hidden(self.dropout(x.flatten(1))))
        return self.scores(self.dropout(x))  # type: ignore[no-any-return]


def arguments_parser(description: str | None) -> argparse.ArgumentParser:
    """Hyperparameters arrive as `--name value`; what the platform decides, as SM_* variables."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=32, help="images a rank and step (default: 32)")
    parser.add_argument("--lr", type=float, default=2e-3, help="Adam's learning rate (default: 0.002)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("SM_CHANNEL_TRAINING"))
    parser.add_argument("--model-dir", type=Path, default=os.environ.get("SM_MODEL_DIR", "model"))
    parser.add_argument("--output-data-dir", type=Path, default=os.environ.get("SM_OUTPUT_DATA_DIR", "output"))
    return parser


def current_device() -> torch.device:
    """The GPU that joining the job has given to this rank, or the CPU of a host without."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def load_digits(data_dir: Path | None) -> tuple[TensorDataset, TensorDataset]:
    """The training and the test digits, from digits.npz in the channel, else from scikit-learn."""
    if data_dir is None:
        from sklearn.datasets import load_digits as sklearn_digits

        digits = sklearn_digits()
        pixels, labels = digits.images, digits.target
    else:
        path = data_dir / "digits.npz"
        if not path.exists():
            raise FileNotFoundError(f"{path} is missing: write it with `python prepare.py {data_dir}`")
        with np.load(path) as digits:
            pixels, labels = digits["images"], digits["labels"]
    images = torch.from_numpy(pixels.astype(np.float32) / GREATEST_PIXEL).unsqueeze(1)
    targets = torch.from_numpy(labels.astype(np.int64))
    held_out = torch.zeros(len(targets), dtype=torch.bool)
    for digit in range(10):
        held_out[torch.where(targets == digit)[0][HELD_OUT - 1 :: HELD_OUT]] = True
    return TensorDataset(images[~held_out], targets[~held_out]), TensorDataset(images[held_out], targets[held_out])


def train_epoch(
    model: torch.nn.Module,
    loader: DataLoader[tuple[torch.Tensor, ...]],
    optimizer: torch.optim.Optimizer,
    device: torch.device,
) -> torch.Tensor:
    """One pass over this rank's share; its mean loss, float32 (1,)."""
    model.train()
    total = torch.zeros(1, device=device)
    for images, targets in loader:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images.to(device)), targets.to(device))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        total += loss.detach() / len(loader)
    return total


def accuracy(model: torch.nn.Module, test: TensorDataset, device: torch.device) -> float:
    model.eval()
    images, targets = test.tensors
    with torch.no_grad():
        return float((model(images.to(device)).argmax(1).cpu() == targets).float().mean())


def save(weights: dict[str, Any], metrics: dict[str, float], arguments: argparse.Namespace) -> None:
    """Leave model.pt and metrics.json where the platform collects them. One rank calls it."""
    for directory in (arguments.model_dir, arguments.output_data_dir):
        directory.mkdir(parents=True, exist_ok=True)
    torch.save({name: value.cpu() for name, value in weights.items()}, arguments.model_dir / "model.pt")
    (arguments.output_data_dir / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    print(
        f"test accuracy {metrics['test_accuracy']:.4f} with world size {metrics['world_size']}, "
        f"model in {arguments.model_dir}",
        flush=True,
    )
