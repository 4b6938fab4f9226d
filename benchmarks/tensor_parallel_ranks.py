"""A rank of the tensor-parallel case of benchmarks/modelparallel.py: python tensor_parallel_ranks.py WIDTH ROUNDS.

Both libraries split the same transformer layer over all ranks, and train it with the same batches. DTensor uses gloo,
and ours shared memory. Prints the first rank's seconds and its processor's, also of its share without any
communication. Prints the largest differences of losses and parameters from a run without shares, after 20 steps.
"""

from __future__ import annotations

import copy
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

import smdistributed.modelparallel.torch as smp
from smdistributed.core.launch import set_torch_environment

WIDTH = int(sys.argv[1]) if len(sys.argv) > 1 else 256
HEADS, ROWS, LENGTH, STEPS = WIDTH // 64, 4, WIDTH // 4, 20


class Attention(nn.Module):
    def __init__(self, degree: int) -> None:
        super().__init__()
        self.pre_layernorm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH // degree) for _ in range(3))
        self.dense = nn.Linear(WIDTH // degree, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self.pre_layernorm(hidden)
        parts = (layer(normed) for layer in (self.query, self.key, self.value))
        query, key, value = (part.view(*part.shape[:2], -1, WIDTH // HEADS).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        found: torch.Tensor = hidden + self.dense(mixed.transpose(1, 2).flatten(2))
        return found


class Output(nn.Module):
    def __init__(self, degree: int) -> None:
        super().__init__()
        self.pre_layernorm = nn.LayerNorm(WIDTH)
        self.dense1, self.dense2 = nn.Linear(WIDTH, 4 * WIDTH // degree), nn.Linear(4 * WIDTH // degree, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = hidden + self.dense2(functional.gelu(self.dense1(self.pre_layernorm(hidden))))
        return found


class Layer(nn.Module):
    """A layer of GPT-2, with the parameter names of `smp.nn.DistributedTransformerLayer`.

    With a degree, it is the share of one rank, which computes alone: its results are not sums.
    """

    def __init__(self, degree: int = 1) -> None:
        super().__init__()
        self.attention, self.output = Attention(degree), Output(degree)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.output(self.attention(hidden))
        return found


class Holder(nn.Module):
    """Our layer, with the `forward` of `Layer`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = smp.nn.DistributedTransformerLayer(
            HEADS, WIDTH // HEADS, WIDTH, 4 * WIDTH, 0.0, 0.0, causal_mask_size=LENGTH,
            pre_layernorm=True, post_layernorm=False,
        )  # fmt: skip

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer((hidden, None))[0]
        return found


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Makes SGD: Adam would divide the gradients of keys' biases, which are 0 but for rounding, by themselves."""
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


@smp.step
def our_step(model: Any, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    loss = functional.mse_loss(model(hidden), target)
    model.backward(loss)
    return loss


def ours(plain: nn.Module) -> tuple[Any, Callable[..., float]]:
    model = smp.DistributedModel(Holder())
    model.load_state_dict({f"layer.{name}": value for name, value in plain.state_dict().items()})
    optimizer = smp.DistributedOptimizer(make_optimizer(model.parameters()))

    def step(*batch: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss: torch.Tensor = our_step(model, *batch).reduce_mean()
        optimizer.step()
        return loss.item()

    return model, step


def torchs(layer: nn.Module) -> Callable[..., float]:
    """The plain way to train a module, which may have parameters of DTensor."""
    optimizer = make_optimizer(layer.parameters())

    def step(hidden: torch.Tensor, target: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = functional.mse_loss(layer(hidden), target)
        torch.autograd.backward(loss)
        optimizer.step()
        return loss.item()

    return step


def parallelized(layer: nn.Module) -> nn.Module:
    columns = ("attention.query", "attention.key", "attention.value", "output.dense1")
    plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
    plan.update({name: RowwiseParallel() for name in ("attention.dense", "output.dense2")})
    return parallelize_module(layer, init_device_mesh("cpu", (dist.get_world_size(),)), plan)


def main(rounds: int) -> None:
    set_torch_environment(os.environ)
    dist.init_process_group("gloo")  # of DTensor; smp makes groups of its own
    size = dist.get_world_size()
    smp.init({"partitions": 1, "tensor_parallel_degree": size, "ddp": True, "prescaled_batch": True})
    torch.manual_seed(0)
    plain = Layer()
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(2, ROWS, LENGTH, WIDTH, generator=generator) for _ in range(STEPS)]
    rival = torchs(parallelized(copy.deepcopy(plain)))
    model, own = ours(plain)
    unsplit = torchs(plain)
    losses = max(abs(own(*batch) - unsplit(*batch)) for batch in batches)
    whole = model.state_dict()
    parameters = max(float((whole[f"layer.{name}"] - value).abs().max()) for name, value in plain.state_dict().items())
    ways = {"ours": own, "dtensor": rival, "share": torchs(Layer(size))}
    seconds: dict[str, list[float]] = {f"{name}{kind}": [] for name in ways for kind in ("", "_processor")}
    rival(*batches[0])
    for place in range(rounds * 4):
        for name, step in ways.items():
            dist.barrier()
            began, busy = time.perf_counter(), time.process_time()
            step(*batches[place % STEPS])
            seconds[name].append(time.perf_counter() - began)
            seconds[f"{name}_processor"].append(time.process_time() - busy)
    if dist.get_rank() == 0:
        found = {name: statistics.median(values) for name, values in seconds.items()}
        print(json.dumps({**found, "losses": losses, "parameters": parameters}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[2]))
