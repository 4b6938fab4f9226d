"""The functions with which `serve` answers for the digits: examples/digits/train.py has saved model.pt."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional


class Net(nn.Module):
    """The network of the training script: the file has its weights only."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.hidden, self.scores = nn.Linear(32 * 4 * 4, 64), nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Images (n, 1, 8, 8) from 0 to 1, to scores (n, 10)."""
        x = functional.max_pool2d(functional.relu(self.conv2(functional.relu(self.conv1(images)))), 2)
        return self.scores(functional.relu(self.hidden(x.flatten(1))))


def model_fn(model_dir: str) -> nn.Module:
    """Load the weights."""
    network = Net()
    network.load_state_dict(torch.load(f"{model_dir}/model.pt", map_location="cpu", weights_only=True))
    return network.eval()


def predict_fn(data: np.ndarray[Any, Any], model: nn.Module) -> list[int]:
    """Images of 8 × 8 numbers from 0 to 1, to digits."""
    with torch.inference_mode():
        return model(torch.from_numpy(data).float().reshape(-1, 1, 8, 8)).argmax(1).tolist()
