"""What the scripts of this folder train, and the same trained by torch in one process on the batches of all ranks."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
from torch import nn

STEPS, BATCH, FEATURES, RATE = 6, 4, 5, 0.1
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LOCAL_RANK, LOCAL_SIZE = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1))


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of all steps. Rank r's share of a step are the rows r, r + SIZE, … of its batch."""
    draw = torch.Generator().manual_seed(1)
    count = STEPS * SIZE * BATCH
    return torch.randn(count, FEATURES, generator=draw), torch.randn(count, 1, generator=draw)


def share(step: int, rank: int = RANK) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = (all_rows[step * SIZE * BATCH :][: SIZE * BATCH] for all_rows in rows())
    return inputs[rank::SIZE], targets[rank::SIZE]


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(inputs), targets)


def trained() -> nn.Module:
    """The model after all steps, in one process."""
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    inputs, targets = rows()
    for step in range(STEPS):
        batch = slice(step * SIZE * BATCH, (step + 1) * SIZE * BATCH)
        optimizer.zero_grad()
        loss_of(model, inputs[batch], targets[batch]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model


def check(name: str, parameters: Iterable[torch.Tensor]) -> None:
    """Compare what a library has trained; say so on rank 0."""
    for found, expected in zip(parameters, trained().parameters(), strict=True):
        torch.testing.assert_close(found.detach().cpu().float(), expected.detach(), rtol=0, atol=1e-5)
    if RANK == 0:
        print(f"equal: {name}", flush=True)
