"""A rank of a job with `shard_optimizer_state`: python optimizer_shards.py CASE[,CASE]."""

from __future__ import annotations

import itertools
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.utils import clip_grad_norm_

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.torch.optimizers import FusedLAMB

COMMON: Any = runpy.run_path(str(Path(__file__).with_name("modelparallel.py")))
STEPS, CLIPPING, TOLERANCE = 4, 0.05, 1e-6
KINDS: dict[str, Any] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, 1e-3, eps=1e-4),
    "lamb": lambda parameters: FusedLAMB(parameters, 1e-3, eps=1e-4, max_grad_norm=0.1),
}


def fresh() -> Any:
    torch.manual_seed(3)
    return COMMON["Net"]()


def job(kind: str = "adam", **values: Any) -> tuple[Any, Any]:
    COMMON["configure"](microbatches=2, **{"shard_optimizer_state": True, **values})
    module = fresh()
    optimizer = smp.DistributedOptimizer(KINDS[kind](module.parameters()))
    return smp.DistributedModel(module), optimizer


def step(model: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    COMMON["train_step"](model, *batch)


def plain_step(module: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    COMMON["loss_of"](module(batch[0], scale=0.5)["logits"], batch[1]).backward()


def close(model: Any, module: nn.Module) -> None:
    found = model.state_dict()
    for name, value in module.state_dict().items():
        assert (found[name] - value).abs().max() <= TOLERANCE, name


def shares_are_divided(model: Any, optimizer: Any) -> None:
    """Each parameter of the stage has a gradient and a state on one replica."""
    named = dict(model.local_named_parameters())
    gradients = smp.allgather([name for name, p in named.items() if p.grad is not None], smp.RDP_GROUP)
    assert sorted(itertools.chain(*gradients)) == sorted(named), gradients
    assert all(0 < len(own) < len(named) for own in gradients), gradients
    states = smp.allgather(len(optimizer.local_parts()["state"]), smp.RDP_GROUP)
    assert states == list(map(len, gradients)), states


def adds_up() -> None:
    """Gradients that are not reset add up, as in one process. The norm for clipping is of all."""
    for clip in (
        lambda model, optimizer: optimizer.clip_master_grads(CLIPPING),
        lambda model, optimizer: model.clip_grad_norm_(CLIPPING),
        lambda model, optimizer: clip_grad_norm_(model.parameters(), CLIPPING),
    ):
        module = fresh()
        inner = KINDS["adam"](module.parameters())
        model, optimizer = job()
        data, own = COMMON["batches"](2 * STEPS), COMMON["share_of"](COMMON["batches"](2 * STEPS))
        for at in range(0, 2 * STEPS, 2):
            inner.zero_grad()
            optimizer.zero_grad()
            for part in (at, at + 1):
                plain_step(module, data[part])
                step(model, own[part])
                with torch.no_grad():
                    smp.barrier()
            expected = clip_grad_norm_(module.parameters(), CLIPPING)
            assert abs(float(clip(model, optimizer)) - float(expected)) < TOLERANCE
            inner.step()
            optimizer.step()
            close(model, module)
        shares_are_divided(model, optimizer)


def never_reset() -> None:
    """Gradients of layers that a later step leaves out stay, as in one process."""
    module = fresh()
    inner = torch.optim.SGD(module.parameters(), 0.01)
    COMMON["configure"](microbatches=2, shard_optimizer_state=True)
    ours = fresh()
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(ours.parameters(), 0.01))
    model = smp.DistributedModel(ours)
    data, own = COMMON["batches"](STEPS), COMMON["share_of"](COMMON["batches"](STEPS))
    for number in range(STEPS):
        for net in (module, ours):
            net.blocks[2].requires_grad_(number != 1)
        plain_step(module, data[number])
        step(model, own[number])
        inner.step()
        optimizer.step()
        close(model, module)


def norms() -> None:
    """FusedLAMB's norm is of the gradients of all replicas and stages; hooks average the gradients too."""
    for hooked in (False, True):
        module = fresh()
        inner = KINDS["lamb"](module.parameters())
        model, optimizer = job("lamb")
        if hooked:
            model.register_comm_hook(smp.get_dp_process_group(), allreduce_hook)
        for batch, own in zip(COMMON["batches"](STEPS), COMMON["share_of"](COMMON["batches"](STEPS))):
            inner.zero_grad()
            optimizer.zero_grad()
            plain_step(module, batch)
            step(model, own)
            inner.step()
            optimizer.step()
            close(model, module)
        shares_are_divided(model, optimizer)


def copies() -> None:
    """With half precision, each copy is on one replica, and the model equals one with copies on all."""
    old = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 2)  # no float16 on the CPU
    for half in ("bf16",) if old else ("bf16", "fp16"):
        options: dict[str, Any] = {half: True}
        found = []
        for sharded in (False, True):
            model, optimizer = job(shard_optimizer_state=sharded, deterministic_server=True, **options)
            for own in COMMON["share_of"](COMMON["batches"](STEPS)):
                optimizer.zero_grad()
                step(model, own)
                optimizer.clip_master_grads(CLIPPING)
                optimizer.step()
            found.append(model.state_dict())
        for name, value in found[1].items():  # a norm of other parts may round another way; a step moves by 1e-3
            assert (found[0][name].float() - value.float()).abs().max() < 1e-3, name
        copied = sum(smp.allgather(len(optimizer.master_weights.copies), smp.RDP_GROUP))
        assert copied == len(list(model.local_parameters()))
        shares_are_divided(model, optimizer)


if __name__ == "__main__":
    smp.init({"partitions": int(os.environ["STAGES"]), "ddp": True})
    for case in sys.argv[1].split(","):
        globals()[case]()
        print(f"{case}\n", end="")
