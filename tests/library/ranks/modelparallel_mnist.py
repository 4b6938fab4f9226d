"""A rank of a script in the shape of AWS's MNIST example for model parallelism: modelparallel_mnist.py CHECKPOINT.

A network of two groups of layers, a step that returns the output and the loss, a test step that returns sums of each
microbatch, a schedule of the learning rate, and a partial checkpoint of model and optimizer. The images are
scikit-learn's digits.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import smdistributed.modelparallel.torch as smp


class Features(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)

    def forward(self, x: Any) -> Any:
        x = functional.relu(self.conv2(functional.relu(self.conv1(x))))
        return torch.flatten(functional.max_pool2d(x, 2), 1)


class Classes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(512, 64), nn.Linear(64, 10)

    def forward(self, x: Any) -> Any:
        return functional.log_softmax(self.fc2(functional.relu(self.fc1(x))), 1)


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features, self.classes = Features(), Classes()

    def forward(self, x: Any) -> Any:
        return self.classes(self.features(x))


@smp.step
def train_step(model: Any, data: Any, target: Any) -> Any:
    output = model(data)
    loss = functional.nll_loss(output, target, reduction="mean")
    model.backward(loss)
    return output, loss


@smp.step
def test_step(model: Any, data: Any, target: Any) -> Any:
    output = model(data)
    loss = functional.nll_loss(output, target, reduction="sum").item()
    return loss, output.argmax(1).eq(target).sum().item()


def test(model: Any, data: Any, target: Any) -> tuple[float, float]:
    """Returns the mean loss and the accuracy."""
    model.eval()
    with torch.no_grad():
        losses, right = test_step(model, data, target)
    return sum(losses) / len(data), sum(right) / len(data)


def train(model: Any, optimizer: Any, loader: Any) -> None:
    model.train()
    for data, target in loader:
        optimizer.zero_grad()
        output, loss = train_step(model, data, target)
        optimizer.step()
        assert output.concat().shape == (32, 10) and loss.reduce_mean().shape == ()


def main(checkpoint: str) -> None:
    smp.init({"partitions": 2, "microbatches": 2, "pipeline": "interleaved", "optimize": "speed", "ddp": True})
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    targets = torch.tensor(digits.target)
    training = TensorDataset(images[:1408], targets[:1408])
    sampler: Any = DistributedSampler(training, num_replicas=smp.dp_size(), rank=smp.dp_rank(), seed=0)
    loader = DataLoader(training, 32, sampler=sampler, drop_last=True)
    model = smp.DistributedModel(Grouped())
    optimizer = smp.DistributedOptimizer(torch.optim.Adadelta(model.parameters(), lr=1.0))
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        train(model, optimizer, loader)
        scheduler.step()
    assert round(optimizer.param_groups[0]["lr"], 3) == 0.24
    saved = test(model, images[1408:1796], targets[1408:1796])
    if smp.dp_rank() == 0:
        state = {"model": model.local_state_dict(), "optimizer": optimizer.local_state_dict()}
        smp.save(state, checkpoint, partial=True)
    smp.barrier()

    train(model, optimizer, loader)
    assert test(model, images[1408:1796], targets[1408:1796]) != saved
    state = smp.load(checkpoint, partial=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    assert test(model, images[1408:1796], targets[1408:1796]) == saved
    print(f"accuracy {saved[1]:.3f}\n", end="")


if __name__ == "__main__":
    main(sys.argv[1])
