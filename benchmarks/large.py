"""The accuracy of the digits with a large global batch, and remedies: `make bench-large`.

The gradient of a global batch is the mean over the ranks' shares of it. So one process computes the same steps as many
ranks, and these figures need none. A network with one hidden layer trains for 20 epochs, with 1,437 digits; 360 others
test it. The figures are wrong answers in percent, means over 5 seeds, against the global batch of 32:

- `batch-N-same-rate`: the learning rate of the batch of 32
- `batch-N-scaled`: the rate times N / 32 (linear scaling), at once
- `batch-N-warm-up`: the same rate, reached in the first 5 epochs
- `batch-N-lars`, `batch-N-lamb`: LARS and LAMB of pytorch-optimizer, with the warm-up
- `norm-2-…`: batch normalization of 16 ranks with 2 digits each, against 32 digits of one rank. `local`: by each rank's
  own 2; `group`: group normalization, which does not depend on the batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from statistics import mean
from typing import Any

import torch
from pytorch_optimizer import LARS, Lamb
from report import Figure, finish, make_parser, print_machine
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

SMALL, RATE, EPOCHS, WARM_EPOCHS, SEEDS = 32, 0.1, 20, 5, 5
TEST = 360
Net = Callable[[], nn.Module]
LARS_RATES, LAMB_RATES = {256: 0.8, 1024: 1.6}, {256: 0.03, 1024: 0.1}
"""The best of four that were tried, by global batch."""


def main(arguments: list[str]) -> int:
    """Train, and print the figures."""
    make_parser(__doc__).parse_args(arguments)
    print_machine()
    torch.set_num_threads(1)
    small = errors(SMALL, RATE)
    figures = [Figure(f"batch-{SMALL}", mean(small), "%", rounds=small)]
    for batch in LAMB_RATES:
        rate = RATE * batch / SMALL
        ways: dict[str, list[float]] = {
            "same-rate": errors(batch, RATE),
            "scaled": errors(batch, rate),
            "warm-up": errors(batch, rate, warm=True),
            "lars": errors(batch, LARS_RATES[batch], warm=True, optimizer=lars),
            "lamb": errors(batch, LAMB_RATES[batch], warm=True, optimizer=lamb),
        }
        figures += [against(small, f"batch-{batch}-{way}", found) for way, found in ways.items()]
    figures += norms()
    return finish(figures)


def against(rival: list[float], name: str, found: list[float], rival_name: str = f"batch-{SMALL}") -> Figure:
    """A figure of wrong answers."""
    return Figure(name, mean(found), "%", rival=mean(rival), rival_name=rival_name, rounds=found)


def norms() -> list[Figure]:
    """The figures of batch normalization with 2 digits on each of 16 ranks."""
    together = errors(SMALL, RATE, net=batch_norm)
    local = errors(SMALL, RATE, net=batch_norm, ranks=16)
    group = errors(SMALL, RATE, net=group_norm, ranks=16)
    return [
        Figure("norm-32", mean(together), "%", rounds=together),
        against(together, "norm-2-local", local, "norm-32"),
        against(together, "norm-2-group", group, "norm-32"),
    ]


def lars(parameters: Any, rate: float) -> torch.optim.Optimizer:
    return LARS(parameters, lr=rate, momentum=0.9, weight_decay=1e-4, trust_coefficient=0.02)


def lamb(parameters: Any, rate: float) -> torch.optim.Optimizer:
    return Lamb(parameters, lr=rate)


def sgd(parameters: Any, rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=rate, momentum=0.9)


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10))


def group_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.GroupNorm(8, 128), nn.ReLU(), nn.Linear(128, 10))


def errors(
    batch: int,
    rate: float,
    warm: bool = False,
    optimizer: Callable[[Any, float], torch.optim.Optimizer] = sgd,
    net: Net = plain,
    ranks: int = 1,
) -> list[float]:
    """Wrong answers in percent, by seed."""
    return [train(seed, batch, rate, warm, optimizer, net, ranks) for seed in range(SEEDS)]


def train(
    seed: int,
    batch: int,
    rate: float,
    warm: bool,
    make: Callable[[Any, float], torch.optim.Optimizer],
    net: Net,
    ranks: int,
) -> float:
    """Wrong answers in percent after the last epoch. Each rank computes a share of the batch, one after the other."""
    torch.manual_seed(seed)
    images, labels, order = digits()
    model = net()
    optimizer = make(model.parameters(), rate)
    steps = (len(order) - TEST) // batch
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / (WARM_EPOCHS * steps)) if warm else 1.0
    )
    for some in (some for _ in range(EPOCHS) for some in batches(order[TEST:], batch)):
        optimizer.zero_grad()
        for share in some.chunk(ranks):
            (functional.cross_entropy(model(images[share]), labels[share]) / ranks).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        wrong = model(images[order[:TEST]]).argmax(1) != labels[order[:TEST]]
    return float(100 * wrong.float().mean())


def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The images (1797, 64), their labels, and an order of them by the seed."""
    data = load_digits()
    images = torch.tensor(data.data, dtype=torch.float32) / 16
    return images, torch.tensor(data.target), torch.randperm(len(images))


def batches(order: torch.Tensor, batch: int) -> Iterator[torch.Tensor]:
    """Whole batches of an epoch, in an order of its own."""
    shuffled = order[torch.randperm(len(order))]
    yield from (shuffled[first : first + batch] for first in range(0, len(order) - batch + 1, batch))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
