"""A rank of a tensor-parallel job: python tensor_parallel.py CASE [ARGUMENT ...], with mp_parameters of the launch."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.torch.utils import get_distribution_axis

STEPS, BATCH, TOLERANCE = 20, 16, 1e-6


class Mlp(nn.Module):
    """An embedding and linear layers; one shares its weight, and one has a size that 2 does not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 24, padding_idx=0)
        self.up, self.down = nn.Linear(24, 48), nn.Linear(48, 24, bias=False)
        self.odd = nn.Linear(24, 7)
        self.back = nn.Linear(7, 24)
        self.norm = nn.LayerNorm(24)
        self.tied, self.head = nn.Linear(24, 24), nn.Linear(24, 24)
        self.head.weight = self.tied.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        hidden = hidden + self.down(functional.gelu(self.up(self.norm(hidden))))
        hidden = hidden + self.back(torch.tanh(self.odd(hidden)))
        found: torch.Tensor = self.head(torch.tanh(self.tied(hidden)))
        return found.sum(-1)


def batches(count: int = STEPS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [
        (torch.randint(0, 50, (BATCH, 5), generator=generator), torch.randn(BATCH, 5, generator=generator))
        for _ in range(count)
    ]


def own_rows(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a batch: by replica, or by replica of the whole model with `prescaled_batch`."""
    if smp.state.cfg.prescaled_batch:
        return tensor.chunk(smp.rdp_size())[smp.rdp_rank()]
    return tensor.chunk(smp.dp_size())[smp.dp_rank()]


@smp.step
def train_step(model: Any, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    loss = functional.mse_loss(model(tokens), target)
    model.backward(loss)
    return loss


def plain_run(module: nn.Module, clip: float, make: Callable[..., Any]) -> list[float]:
    optimizer, losses = make(module.parameters()), []
    for tokens, target in batches():
        optimizer.zero_grad()
        loss = functional.mse_loss(module(tokens), target)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


def mean_over_replicas(value: torch.Tensor) -> float:
    return float(sum(smp.allgather(value.item(), smp.DP_GROUP)) / smp.dp_size())


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=10 * tolerance)


def trains_as_one_process() -> None:
    """Losses, clipped updates, joined parameters and the optimizer's state equal those of one process."""
    torch.manual_seed(0)
    plain = Mlp()
    whole = copy.deepcopy(plain)
    expected = plain_run(whole, 0.5, lambda parameters: torch.optim.AdamW(parameters, 1e-2))
    smp.set_tensor_parallelism(plain)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(plain.parameters(), 1e-2))
    model = smp.DistributedModel(plain)
    names = {name for name, module in model.module.named_modules() if isinstance(module, smp.nn.DistributedModule)}
    assert names == {"embed", "up", "down", "odd"}, names
    losses = []
    for tokens, target in batches():
        optimizer.zero_grad()
        loss = train_step(model, own_rows(tokens), own_rows(target)).reduce_mean()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(mean_over_replicas(loss))
    close(torch.tensor(losses), torch.tensor(expected))
    if smp.rdp_rank() == 0:
        for name, value in model.state_dict().items():
            close(value, whole.state_dict()[name], 1e-5)
    shares = [name for name, p in model.local_named_parameters() if model.is_distributed_parameter(p)]
    assert (len(shares) > 0) or smp.pp_size() > 1


def wrapped(rate: float = 1e-2) -> tuple[Any, Any]:
    torch.manual_seed(0)
    plain = Mlp()
    smp.set_tensor_parallelism(plain)
    model = smp.DistributedModel(plain)
    return model, smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), rate))


def run_steps(model: Any, optimizer: Any, begin: int, end: int) -> list[float]:
    losses = []
    for tokens, target in batches()[begin:end]:
        optimizer.zero_grad()
        losses.append(mean_over_replicas(train_step(model, own_rows(tokens), own_rows(target)).reduce_mean()))
        optimizer.step()
    return losses


def saves(directory: str) -> None:
    """Saves partial and full checkpoints after 5 steps, and the losses of the next 5."""
    model, optimizer = wrapped()
    run_steps(model, optimizer, 0, 5)
    for partial in (True, False):
        smp.save_checkpoint(directory, "five", partial, model, optimizer)
    smp.save(model.local_state_dict(), f"{directory}/local")
    if smp.rank() == 0:
        content = torch.load(f"{directory}/five", weights_only=True)
        assert content["up.weight"].shape == (48, 24)
        assert {path.name for path in Path(directory).glob("local_*")} >= {"local_0_0"}
    losses = run_steps(model, optimizer, 5, 10)
    if smp.rank() == 0:
        torch.save(losses, f"{directory}/losses")


def resumes(directory: str) -> None:
    """Both kinds of checkpoints continue with the same losses."""
    model, optimizer = wrapped()
    for partial in (True, False):
        smp.resume_from_checkpoint(directory, "five", partial)
        losses = run_steps(model, optimizer, 5, 10)
        close(torch.tensor(losses), torch.tensor(torch.load(f"{directory}/losses")))


def trains_in_half_precision() -> None:
    """The loss falls as without shares, and the norm before clipping is that of all shares."""
    torch.manual_seed(0)
    plain = Mlp()
    whole = copy.deepcopy(plain)
    model, optimizer = wrapped()
    tokens, target = batches()[0]
    torch.autograd.backward(functional.mse_loss(whole(tokens), target))
    expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
    optimizer.zero_grad()
    train_step(model, own_rows(tokens), own_rows(target))
    norm = optimizer.clip_master_grads(1.0)
    assert abs(norm - expected.item()) < 0.03 * expected.item(), (norm, expected)
    losses = [sum(run_steps(model, optimizer, 0, 20)) for _ in range(2)]
    assert losses[1] < 0.9 * losses[0], losses


class Doubled(nn.Module):
    """A script's own module, with other arguments than its tensor-parallel version."""

    def __init__(self, size: int, *, factor: float = 2.0) -> None:
        super().__init__()
        self.inner = nn.Linear(size, size)
        self.factor = factor

    def forward(self, value: torch.Tensor, *, scale: float) -> dict[str, torch.Tensor]:
        return {"out": self.inner(value * scale) * self.factor}


class DistributedDoubled(smp.nn.DistributedModule):
    def __init__(self, size: int, factor: float, bias: bool = True) -> None:
        super().__init__()
        self.inner, self.factor = smp.nn.DistributedLinear(size, size, bias), factor

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(value)
        return found * self.factor


def registers() -> None:
    """Hooks translate arguments and outputs; options win over the hook's; optimizers from before are refused."""
    smp.tp_register(
        DistributedDoubled,
        init_hook=lambda size, *, factor=2.0: ((size, factor), {"bias": True}),
        forward_hook=lambda value, *, scale: ((value * scale,), {}),
        return_hook=lambda output: {"out": output},
    )(Doubled)
    with smp.tensor_parallelism(bias=False):
        module = nn.Sequential(Doubled(8, factor=3.0))
        with smp.tensor_parallelism(False):
            module.append(nn.Linear(8, 8))
    early = smp.DistributedOptimizer(torch.optim.SGD(module.parameters(), 0.1))
    model = smp.DistributedModel(module)
    replaced: Any = module[0]
    assert isinstance(replaced, DistributedDoubled) and replaced.inner.bias is None and replaced.factor == 3.0
    assert type(module[1]) is nn.Linear
    assert get_distribution_axis(replaced.inner.weight) == 1
    assert get_distribution_axis(module[1].weight) is None
    value = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    weight = model.state_dict()["0.inner.weight"]
    close(replaced(value, scale=0.5)["out"], 3.0 * functional.linear(value * 0.5, weight))
    try:
        early.step()
    except smp.exceptions.SMPRuntimeError as error:
        assert "create the optimizer after smp.DistributedModel" in str(error)
    else:
        raise AssertionError("an optimizer of replaced parameters was accepted")


if __name__ == "__main__":
    smp.init({})
    globals()[sys.argv[1]](*sys.argv[2:])
