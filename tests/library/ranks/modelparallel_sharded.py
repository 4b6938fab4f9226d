"""A rank of a job with sharded data parallelism: python modelparallel_sharded.py CASE[,CASE] [DIRECTORY]."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.backend.exceptions import SMPUnsupportedError

COMMON: Any = runpy.run_path(str(Path(__file__).with_name("modelparallel.py")))
KINDS: Any = runpy.run_path(str(Path(__file__).with_name("modelparallel_options.py")))["KINDS"]
KINDS["adamw"] = lambda parameters: torch.optim.AdamW(parameters, 1e-3, eps=1e-4)
KINDS["sgd"] = lambda parameters: torch.optim.SGD(parameters, 0.02, momentum=0.9)
STEPS, TOLERANCE, CLIPPING = 6, 1e-6, 0.05
DEGREE, STAGES = int(os.environ["DEGREE"]), int(os.environ.get("STAGES", "1"))
CLIPPED = {"sdp_gradient_clipping": CLIPPING} if DEGREE > 1 else {}


class Block(nn.Module):
    """An odd width, so that parts differ in size; more shards than rows in `gate`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(23), nn.Linear(23, 47), nn.Linear(47, 23)
        self.gate = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.gate * self.down(torch.tanh(self.up(self.norm(hidden))))  # type: ignore[no-any-return]


class Net(nn.Module):
    """Tied weights, blocks in a list, blocks in a sequence, a buffer, an output of a part that is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 23)
        nn.init.normal_(self.embed.weight, std=0.2)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.tail = nn.Sequential(*(Block() for _ in range(3)))
        self.last = nn.Sequential(nn.Linear(23, 23), nn.ReLU(inplace=True))
        self.register_buffer("shift", torch.full((23,), 0.1))
        self.head = nn.Linear(23, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens) + self.shift
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.last(self.tail(hidden)))  # type: ignore[no-any-return]


def fresh() -> Net:
    torch.manual_seed(3)
    return Net()


def configure(**values: Any) -> None:
    COMMON["configure"](**{"sharded_data_parallel_degree": DEGREE, "microbatches": 2, **values})


def alone(clipping: float, kind: str) -> tuple[list[float], Net]:
    """Plain torch's losses and model, with the batches of all ranks."""
    module, losses = fresh(), []
    optimizer = KINDS[kind](module.parameters())
    for tokens, target in COMMON["batches"](STEPS):
        optimizer.zero_grad()
        loss = COMMON["loss_of"](module(tokens), target)
        loss.backward()
        clip_grad_norm_(module.parameters(), clipping or float("inf"))
        optimizer.step()
        losses.append(loss.item())
    return losses, module


@smp.step
def train_step(model: Any, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = COMMON["loss_of"](model(tokens), target)
    model.backward(loss)
    return loss


class Job:
    def __init__(self, early: bool = True, kind: str = "adamw") -> None:
        self.module = fresh()
        # Their joint functions for all parameters refuse DTensors.
        options = {"foreach": False} if kind.endswith("large batches") else {}
        inner = KINDS[kind](self.module.parameters(), **options) if early else None
        self.kind, self.model = kind, smp.DistributedModel(self.module)
        self.optimizer = smp.DistributedOptimizer(inner or KINDS[kind](self.model.parameters(), **options))

    def train(self, first: int = 0, last: int = STEPS) -> list[float]:
        losses = []
        for tokens, target in COMMON["share_of"](COMMON["batches"](last))[first:]:
            self.optimizer.zero_grad()
            losses.append(float(train_step(self.model, tokens, target).reduce_mean()))
            if DEGREE == 1:
                self.optimizer.clip_master_grads(CLIPPING)
            self.optimizer.step()
        return [sum(parts) / len(parts) for parts in zip(*smp.allgather(losses, smp.DP_GROUP))]


def compare(job: Job, losses: list[float], clipping: float, tolerance: float = TOLERANCE, first: int = 0) -> None:
    expected, module = alone(clipping, job.kind)
    worst = max(abs(one - other) for one, other in zip(losses, expected[first:], strict=True))
    assert worst <= tolerance, (worst, losses, expected)
    found = job.model.state_dict()
    for name, value in module.state_dict().items():
        difference = (found[name].float() - value).abs().max().item()
        assert difference <= tolerance, (name, difference)


def equal() -> None:
    """Losses and parameters are those of plain torch, and each rank holds its part alone."""
    for clipping in (CLIPPING, 0.0):
        for early in (True, False):
            configure(sdp_gradient_clipping=clipping)
            job = Job(early)
            compare(job, job.train(), clipping)
    parts: Any = list(job.module.parameters())
    held = sum(part.to_local().numel() for part in parts)
    whole = sum(p.numel() for p in fresh().parameters())
    assert held < whole / DEGREE * 1.2, (held, whole)


def kinds() -> None:
    """Optimizers that use the norm of a whole parameter, or of all gradients."""
    for kind in sorted(KINDS.keys() - {"lamb, large batches"}):  # it changes a norm in place, which DTensor refuses
        configure(sdp_gradient_clipping=0)
        job = Job(kind=kind)
        compare(job, job.train(), 0)


def checkpointed() -> None:
    """The children of a sequence are computed again one by one, although a part of them is gathered for each."""
    configure(sdp_gradient_clipping=0, offload_activations=True)
    job = Job()
    calls: list[int] = []
    for index, block in enumerate(job.module.tail):
        block.register_forward_pre_hook(lambda *_, index=index: calls.append(index))
    smp.set_activation_checkpointing(job.module.tail)
    smp.set_activation_checkpointing(job.module.blocks[0])
    compare(job, job.train(), 0)
    assert calls.count(0) == calls.count(2) == 2 * 2 * STEPS, calls


def habits() -> None:
    """Clipping by the script, evaluating without a backward between steps, several steps for each update."""
    for clip in (
        lambda job: job.optimizer.clip_master_grads(CLIPPING),
        lambda job: job.model.clip_grad_norm_(CLIPPING),
        lambda job: clip_grad_norm_(job.model.parameters(), CLIPPING),
    ):
        configure(sdp_gradient_clipping=0)
        job, losses = Job(), []
        for tokens, target in COMMON["share_of"](COMMON["batches"](STEPS)):
            evaluate(job.model, tokens)
            with torch.no_grad():
                evaluate(job.model, tokens)
            job.optimizer.zero_grad()
            losses.append(float(train_step(job.model, tokens, target).reduce_mean()))
            evaluate(job.model, tokens)
            norm = float(clip(job))
            job.optimizer.step()
            assert norm > CLIPPING
            evaluate(job.model, tokens)
        compare(job, [sum(parts) / len(parts) for parts in zip(*smp.allgather(losses, smp.DP_GROUP))], CLIPPING)


@smp.step
def evaluate(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens).detach()  # type: ignore[no-any-return]


def outside() -> None:
    """Without smp.step, which one partition does not need."""
    configure(sdp_gradient_clipping=CLIPPING)
    job, losses = Job(), []
    for tokens, target in COMMON["share_of"](COMMON["batches"](STEPS)):
        job.optimizer.zero_grad()
        loss = COMMON["loss_of"](job.model(tokens), target)
        job.model.backward(loss)
        job.optimizer.step()
        with torch.no_grad():
            job.model(tokens)
        losses.append(loss.item())
    compare(job, [sum(parts) / len(parts) for parts in zip(*smp.allgather(losses, smp.DP_GROUP))], CLIPPING)


def half() -> None:
    for options in ({"bf16": True}, {"fp16": True}):
        configure(sdp_gradient_clipping=CLIPPING, **options)
        job = Job()
        compare(job, job.train(), CLIPPING, 0.02)
        copies: Any = job.optimizer.master_weights.copies.values()
        assert len(copies) == len(list(job.model.parameters()))
        assert {copy.to_local().dtype for copy in copies} == {torch.float32}


def names() -> None:
    """What published scripts read."""
    configure(sdp_gradient_clipping=CLIPPING)
    job = Job()
    job.train(0, 1)
    assert job.optimizer._global_grad_norm > CLIPPING
    parameters: Any = list(job.model.named_parameters())
    assert {name: p.ds_shape for name, p in parameters} == {name: p.shape for name, p in Net().named_parameters()}
    flat = job.optimizer.fp32_partitioned_groups_flat
    assert [part.numel() for part in flat] == [sum(p.ds_tensor.ds_numel for _, p in parameters)]
    norms = torch.stack([p.ds_tensor.square().sum() for _, p in parameters])
    torch.distributed.all_reduce(norms, group=job.optimizer.ds_param_shard_group)
    whole = job.model.state_dict()
    for (name, _), found in zip(parameters, norms):
        assert abs(whole[name].square().sum() - found) < 1e-5, name
    assert [len(group) for group in job.optimizer.fp16_groups] == [len(parameters)]
    for refused in (job.model.cpu, lambda: job.model.register_comm_hook(None, print)):
        try:
            refused()
        except SMPUnsupportedError as error:
            assert "'sharded_data_parallel_degree'" in str(error)
            continue
        raise AssertionError("it is not refused")


class Borrows(nn.Module):
    """Its second module computes with a weight of the first, without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), Lent(), nn.Linear(8, 8)
        self.second.__dict__["weight"] = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.second.__dict__["weight"] = self.first.weight
        return self.third(self.second(self.first(x)))  # type: ignore[no-any-return]


class Lent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.__dict__["weight"], self.bias)


def foreign() -> None:
    configure(sdp_gradient_clipping=0)
    torch.manual_seed(0)
    module = Borrows()
    expected = module(torch.ones(2, 8)).detach()
    lent: Any = module.first.weight
    smp.register_parameter(module.second, lent)
    model = smp.DistributedModel(module)
    found = model(torch.ones(2, 8))
    model.backward(found.sum())
    assert torch.equal(found, expected)


def delayed() -> None:
    """Parts are made unit by unit, with the values that any number of ranks makes."""
    configure(delayed_parameter_initialization=True, sdp_gradient_clipping=0)
    torch.manual_seed(5)
    with smp.model_creation():
        module = nn.Sequential(nn.Linear(100, 100), nn.Sequential(nn.Linear(100, 100), nn.Tanh()))
    assert module[0].weight.is_meta
    inner = torch.optim.SGD(module.parameters(), 0.1)
    model, optimizer = smp.DistributedModel(module), smp.DistributedOptimizer(inner)
    loss = model(torch.ones(2, 100)).square().mean()
    model.backward(loss)
    optimizer.step()
    assert model(torch.ones(2, 100)).square().mean() < loss
    print(f"values {loss.item():.6f}\n", end="")


def saved(directory: str) -> None:
    """Partial and full checkpoints, after three steps; resumed at once with the same degree."""
    configure(**CLIPPED)
    job = Job()
    losses = job.train(0, 3)
    for partial in (True, False):
        smp.save_checkpoint(directory, f"tag{partial}", partial, job.model, job.optimizer, {"partial": partial})
    compare(job, losses + job.train(3), CLIPPING)
    resumed(directory)


def resumed(directory: str) -> None:
    """The rest of the steps, of what any layout has saved."""
    for partial in (True, False):
        configure(**CLIPPED)
        job = Job()
        assert smp.resume_from_checkpoint(directory, f"tag{partial}", partial) == {"partial": partial}
        compare(job, job.train(3), CLIPPING, first=3)
    if DEGREE > 1:
        configure(**CLIPPED)
        job = Job()
        smp.resume_from_checkpoint(directory, "tagTrue", load_sharded_optimizer_state=False)
        assert not job.optimizer.optimizer.state


def main(cases: str, directory: str = "") -> None:
    smp.init({"partitions": STAGES, "ddp": True, "sharded_data_parallel_degree": DEGREE})
    for case in cases.split(","):
        globals()[case](*([directory] if directory else []))
        print(f"{case}\n", end="")


if __name__ == "__main__":
    main(*sys.argv[1:])
