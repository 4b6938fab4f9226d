"""Shared by the PyTorch scripts: the network, the digits as tensors, one epoch of training, and saving."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from digits import read_digits, save_metrics
from torch.nn import functional
from torch.utils.data import TensorDataset

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from digits import Digits


class Net(torch.nn.Module):
    """From images (n, 1, 8, 8), float32 from 0 to 1, to scores (n, 10)."""

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


def current_device() -> torch.device:
    """Return this rank's GPU, which joining the job selected, or the CPU if the host has no GPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def load_digits(data_dir: Path | None) -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the test digits, with images (n, 1, 8, 8)."""
    training, test = read_digits(data_dir)
    return _tensors(training), _tensors(test)


def _tensors(digits: Digits) -> TensorDataset:
    return TensorDataset(torch.from_numpy(digits.images).unsqueeze(1), torch.from_numpy(digits.labels))


def train_epoch(
    model: torch.nn.Module,
    batches: Iterable[Sequence[torch.Tensor]],
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    total: torch.Tensor,
) -> None:
    """Train on a rank's batches once, and add their losses to `total`, float32 (1,)."""
    model.train()
    for images, targets in batches:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images.to(device)), targets.to(device))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        total += loss.detach()


def accuracy(model: torch.nn.Module, test: TensorDataset, device: torch.device) -> float:
    model.eval()
    images, targets = test.tensors
    with torch.no_grad():
        return float((model(images.to(device)).argmax(1).cpu() == targets).float().mean())


def save(weights: dict[str, Any], metrics: dict[str, float], arguments: argparse.Namespace) -> None:
    """Write model.pt and metrics.json where the platform collects them. Called by one rank."""
    arguments.model_dir.mkdir(parents=True, exist_ok=True)
    torch.save({name: value.cpu() for name, value in weights.items()}, arguments.model_dir / "model.pt")
    save_metrics(metrics, arguments)
