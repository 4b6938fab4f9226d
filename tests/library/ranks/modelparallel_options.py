"""A rank of a job that trains once for each combination of options: python FILE SEED ALONE PAIRS PATH.

ALONE, PAIRS: how many options alone, and pairs of them, are drawn at random; `all`: each. Five steps of each have the
losses and parameters of plain torch.
"""

from __future__ import annotations

import copy
import itertools
import os
import random
import runpy
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.torch.optimizers import FusedAdam, FusedLAMB, FusedNovoGrad

COMMON: Any = runpy.run_path(str(Path(__file__).with_name("modelparallel.py")))
NORM, VALUE = 0.1, 0.002
STEPS, RESUMED_AFTER, TOLERANCE, HALF_TOLERANCE = 5, 2, 2e-6, 0.05

CONFIG: dict[str, dict[str, Any]] = {
    "four microbatches": {"microbatches": 4},
    "simple": {"microbatches": 4, "pipeline": "simple"},
    "one active": {"microbatches": 4, "active_microbatches": 1},
    "ordered sums": {"microbatches": 4, "deterministic_server": True},
    "uneven": {"microbatches": 3, "uneven_microbatches": True},
    "speed": {"optimize": "speed"},
    "by operations": {"memory_weight": 0.0},
    "untraced": {"skip_tracing": True},
    "by hand": {"auto_partition": False, "default_partition": 0},
    "sharded state": {"shard_optimizer_state": True},
    "delayed": {"delayed_parameter_initialization": True},
    "offloaded": {"offload_activations": True, "activation_loading_horizon": 2},
    "fp16": {"fp16": True},
    "bf16": {"bf16": True},
}
MODEL: dict[str, dict[str, Any]] = {
    "averaged late": {"overlapping_allreduce": False},
    "small buckets": {"bucket_cap_mb": 0},
    "two passes": {"backward_passes_per_step": 2},
    "summed": {"average_grads_across_microbatches": False},
    "own buffers": {"broadcast_buffers": False},
}
OPTIMIZER: dict[str, dict[str, Any]] = {
    "static scale": {"static_loss_scale": 1024.0},
    "dynamic scale": {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 2.0**10}},
}
KINDS: dict[str, Any] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, 1e-3, eps=1e-4),
    "lamb": lambda parameters: FusedLAMB(parameters, 1e-3, eps=1e-4, max_grad_norm=0.1),
    "fused adam": lambda parameters: FusedAdam(parameters, 1e-3, eps=1e-4, weight_decay=0.1),
    "novograd": lambda parameters: FusedNovoGrad(parameters, 1e-3, weight_decay=0.1),
}
if find_spec("pytorch_optimizer"):  # only a checkout has it, and not an image
    import pytorch_optimizer

    KINDS["lamb, large batches"] = lambda parameters, **how: pytorch_optimizer.Lamb(parameters, 1e-3, eps=1e-4, **how)
    KINDS["lars, large batches"] = lambda parameters, **how: pytorch_optimizer.LARS(parameters, 1e-2, **how)
OTHERS: tuple[str, ...] = (
    "checkpointed each",
    "checkpointed contiguous",
    "checkpointed group_2",
    "optimizer.backward",
    "resumed",
)
OTHERS += ("graph kept", "hooked")
HABITS: tuple[str, ...] = ("clipped", "clipped by torch", "clipped by the model", "clipped by value")
HABITS += ("frozen", "unfrozen", "scheduled", "smaller batches", "evaluated between")
EXCLUDED: tuple[set[str], ...] = ({"fp16", "bf16"}, {"uneven", "summed"}, {"frozen", "unfrozen"})
EXCLUDED += ({"resumed", "delayed"}, {"resumed", "scheduled"})
UNFROZEN_AFTER = 2


def options() -> list[str]:
    """All of them; half precision only where this torch has it on the CPU."""
    old = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 2)
    names = [*CONFIG, *MODEL, *OPTIMIZER, *KINDS, *OTHERS, *HABITS]
    return [name for name in names if not (old and name in ("fp16", "offloaded"))]


def fits(names: tuple[str, ...]) -> bool:
    """Whether no two say something else about the same, and all mean something together."""
    chosen = set(names)
    keys = [key for name in names for part in (CONFIG, MODEL, OPTIMIZER) for key in part.get(name, ())]
    kinds = [[name for name in names if name in KINDS or name.startswith("checkpointed")]]
    kinds.append([name for name in names if name.startswith("clipped")])
    same = {key for key in keys if keys.count(key) > 1} - {"microbatches"}
    mixed = "uneven" in chosen and any("microbatches" in CONFIG.get(name, {}) for name in names if name != "uneven")
    return not (same or mixed or max(map(len, kinds)) > 1 or any(pair <= chosen for pair in EXCLUDED))


def data_of(names: tuple[str, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The batches; every second one is half as large for `smaller batches`."""
    halves = "smaller batches" in names
    found = enumerate(COMMON["batches"](STEPS))
    return [tuple(part[: len(part) // 2] if halves and i % 2 else part for part in batch) for i, batch in found]


def freeze(names: tuple[str, ...], module: Any, number: int) -> None:
    """A block does not train, in all steps or in the first ones."""
    is_frozen = "frozen" in names or ("unfrozen" in names and number < UNFROZEN_AFTER)
    module.blocks[1].requires_grad_(not is_frozen)


class Reference:
    """Plain torch's losses and parameters, by the kind of optimizer and what the script does beside."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.fresh: nn.Module = COMMON["Net"]()
        self._known: dict[tuple[str, ...], tuple[list[float], nn.Module]] = {}

    def of(self, names: tuple[str, ...]) -> tuple[list[float], nn.Module]:
        key = (kind_of(names), *(name for name in HABITS if name in names))
        if key not in self._known:
            self._known[key] = self._train(key)
        return self._known[key]

    def _train(self, names: tuple[str, ...]) -> tuple[list[float], nn.Module]:
        module, losses = copy.deepcopy(self.fresh), []
        inner = optimizer_of(names[0], module)
        schedule = torch.optim.lr_scheduler.ExponentialLR(inner, 0.5 if "scheduled" in names else 1.0)
        for number, (tokens, target) in enumerate(data_of(names)):
            freeze(names, module, number)
            inner.zero_grad()
            loss = COMMON["loss_of"](module(tokens, scale=0.5)["logits"], target)
            loss.backward()
            if "clipped by value" in names:
                nn.utils.clip_grad_value_(module.parameters(), VALUE)
            elif any(name.startswith("clipped") for name in names):
                nn.utils.clip_grad_norm_(module.parameters(), NORM)
            inner.step()
            schedule.step()
            losses.append(loss.item())
        return losses, module


def kind_of(names: tuple[str, ...]) -> str:
    return next((name for name in names if name in KINDS), "sgd")


def optimizer_of(kind: str, module: nn.Module) -> Any:
    return KINDS[kind](module.parameters()) if kind in KINDS else COMMON["make_optimizer"]("sgd", module)


class Job:
    """A model and optimizer with these options."""

    def __init__(self, names: tuple[str, ...], fresh: nn.Module) -> None:
        given = [
            {key: value for name in names for key, value in part.get(name, {}).items()} for part in (CONFIG, MODEL)
        ]
        COMMON["configure"](**{"microbatches": 2, **given[0]})
        self.names, self.passes = names, given[1].get("backward_passes_per_step", 1)
        self.share = 1.0 / self.passes
        if "summed" in names:
            self.share /= smp.state.cfg.microbatches
        self.module: nn.Module = copy.deepcopy(fresh)
        self._mark()
        inner = optimizer_of(kind_of(names), self.module)
        scale = {key: value for name in names for key, value in OPTIMIZER.get(name, {}).items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if scale else "error")
            self.optimizer = smp.DistributedOptimizer(inner, **scale)
        self.model = smp.DistributedModel(self.module, **given[1])
        if "hooked" in names:
            self.model.register_comm_hook(smp.get_dp_process_group(), allreduce_hook)
        self.step = smp.step(self._step, detach_outputs="graph kept" not in names)

    def _mark(self) -> None:
        blocks: Any = self.module.blocks
        if "by hand" in self.names:
            smp.set_partition(blocks[1], smp.pp_size() - 1)
        for name in self.names:
            if name.startswith("checkpointed"):
                strategy = name.split()[1]
                # Modules that compute in place cannot be computed again one by one.
                for part in (*(blocks if strategy != "each" else ()), self.module.tail):
                    smp.set_activation_checkpointing(part, strategy=strategy)

    def _step(self, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = COMMON["loss_of"](self.model(tokens, scale=0.5)["logits"].float(), target)
        (self.optimizer if "optimizer.backward" in self.names else self.model).backward(loss * self.share)
        return loss

    def train(self, data: Any, first: int = 0) -> list[float]:
        losses = []
        schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5 if "scheduled" in self.names else 1.0)
        for number, (tokens, target) in enumerate(data, first):
            freeze(self.names, self.module, number)
            self.optimizer.zero_grad()
            for _ in range(self.passes):
                loss = self.step(tokens, target).outputs
            self._clip()
            self.optimizer.step()
            schedule.step()
            if "evaluated between" in self.names:
                self.model.eval()
                with torch.no_grad():
                    evaluate(self.model, tokens)
                self.model.train()
            sizes = [len(tokens) // len(loss) + (i < len(tokens) % len(loss)) for i in range(len(loss))]
            losses.append(sum(float(part.detach()) * size for part, size in zip(loss, sizes)) / len(tokens))
        return losses

    def _clip(self) -> None:
        if "clipped" in self.names:
            self.optimizer.clip_master_grads(NORM)
        if "clipped by torch" in self.names:
            nn.utils.clip_grad_norm_(self.model.parameters(), NORM)
        if "clipped by the model" in self.names:
            self.model.clip_grad_norm_(NORM)
        if "clipped by value" in self.names:
            nn.utils.clip_grad_value_(self.model.parameters(), VALUE)


@smp.step
def evaluate(model: Any, tokens: torch.Tensor) -> Any:
    return model(tokens, scale=0.5)["logits"]


def check(names: tuple[str, ...], reference: Reference, path: str) -> None:
    """Train with these options, and compare."""
    data, job = COMMON["share_of"](data_of(names)), Job(names, reference.fresh)
    if "resumed" in names:
        losses = job.train(data[:RESUMED_AFTER])
        directory = Path(path, str(smp.size()))
        smp.save_checkpoint(directory, "tag", True, job.model, job.optimizer)
        job = Job(names, reference.fresh)
        smp.resume_from_checkpoint(directory, "tag")
        losses += job.train(data[RESUMED_AFTER:], RESUMED_AFTER)
    else:
        losses = job.train(data)
    expected, alone = reference.of(names)
    losses = [sum(parts) / len(parts) for parts in zip(*smp.allgather(losses, smp.DP_GROUP))]
    allowed = HALF_TOLERANCE if {"fp16", "bf16"} & set(names) else TOLERANCE
    worst = max(abs(one - other) for one, other in zip(losses, expected))
    assert worst <= allowed, (names, worst, losses, expected)
    wanted = alone.state_dict()
    for name, value in job.model.state_dict().items():
        difference = (value.float() - wanted[name]).abs().max().item()
        assert difference <= allowed, (names, name, difference)


def drawn(chance: random.Random, count: str, known: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    return known if count == "all" else chance.sample(known, int(count))


def main(seed: str, alone: str, together: str, path: str) -> None:
    smp.init({"partitions": int(os.environ["STAGES"]), "ddp": True})
    chance = random.Random(int(seed))
    singles = drawn(chance, alone, [(name,) for name in options()])
    pairs = drawn(chance, together, [pair for pair in itertools.combinations(options(), 2) if fits(pair)])
    reference = Reference()
    for names in (*singles, *pairs):
        check(names, reference, path)
    print(f"options: {len(singles)} alone, {len(pairs)} pairs\n", end="")


if __name__ == "__main__":
    main(*sys.argv[1:])
