"""A rank of a rehearsed model parallel job: each takes its own GPU, autocast off and on, a checkpoint."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import smdistributed.modelparallel.torch as smp


@smp.step
def train_step(model: Any, scaler: Any, data: torch.Tensor, target: torch.Tensor) -> Any:
    with torch.autocast("cuda", enabled=scaler.is_enabled()):
        output = model(data)
    loss = functional.cross_entropy(output.float(), target)
    model.backward(scaler.scale(loss))
    return output, loss


def main(directory: str) -> None:
    smp.init({"partitions": 2, "microbatches": 2})
    torch.cuda.set_device(smp.local_rank())
    device = torch.device("cuda")
    torch.manual_seed(0)
    layers = (nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.ReLU())
    module = nn.Sequential(*layers, nn.Linear(16, 4)).to(device)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(module.parameters(), 0.05))
    data, target = torch.randn(8, 8).to("cuda"), (torch.arange(8) % 4).to(device)
    for mixed in (False, True):
        scaler = smp.amp.GradScaler(enabled=mixed)
        losses = []
        for _ in range(6):
            optimizer.zero_grad()
            outputs, loss = train_step(model, scaler, data, target)
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.reduce_mean().item())
            for result in (outputs.concat(), loss.reduce_mean()):
                assert result.get_device() == smp.local_rank(), result.device
        assert losses[-1] < losses[0], losses
    assert {parameter.get_device() for parameter in model.local_parameters()} == {smp.local_rank()}
    smp.save_checkpoint(directory, "tag", True, model, optimizer)
    smp.resume_from_checkpoint(directory, None, True)
    assert smp.allgather(data, smp.PP_GROUP)[1 - smp.pp_rank()].get_device() == smp.local_rank()
    print(f"rehearsed {smp.rank()}\n", end="")


if __name__ == "__main__":
    main(sys.argv[1])
