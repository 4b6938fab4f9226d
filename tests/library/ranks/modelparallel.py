"""A rank of a model parallel job: python modelparallel.py CASE [ARGUMENT ...]. Several jobs run in one process."""

from __future__ import annotations

import copy
import functools
import itertools
import os
import random
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.backend.config import check
from smdistributed.modelparallel.torch.pipeline import calls, module_routing

STEPS, BATCH, TOLERANCE = 20, 16, 1e-6


class Net(nn.Module):
    """Residual blocks in a list, a sequence, skips, in-place modules, tied weights, keyword arguments, a dict out."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 24)
        nn.init.normal_(self.embed.weight, std=0.2)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(24, 48), nn.ReLU(inplace=True), nn.Dropout(dropout), nn.Linear(48, 24))
            for _ in range(4)
        )
        self.tail = nn.Sequential(*(nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(4)))
        self.norm = nn.LayerNorm(24)
        self.register_buffer("shift", torch.full((24,), 0.1))
        self.head = nn.Linear(24, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        hidden = self.embed(tokens)
        skip = hidden
        for index, block in enumerate(self.blocks):
            hidden = hidden + block(hidden) * scale
            if index == 2:
                hidden = hidden + skip
        hidden = self.norm(self.tail(hidden) + self.blocks[1](skip)) + self.shift
        return {"logits": self.head(hidden), "states": (hidden.mean(), "words")}


def configure(**values: Any) -> None:
    """Another job in this process."""
    smp.state.cfg = check({"partitions": smp.pp_size(), "ddp": smp.dp_size() > 1, **values})
    smp.state.model = smp.state.optimizer = None


def wrapped() -> tuple[Any, Any]:
    """The model and the optimizer of this job."""
    return smp.state.model, smp.state.optimizer


def batches(count: int = STEPS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    drawn = (torch.randint(0, 50, (2, BATCH, 5), generator=generator) for _ in range(count))
    return [(tokens, target) for tokens, target in drawn]


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def make_optimizer(name: str, module: nn.Module) -> torch.optim.Optimizer:
    if name == "adam":
        return torch.optim.Adam(module.parameters(), 1e-3, eps=1e-4)
    return torch.optim.SGD(module.parameters(), 0.02, momentum=0.9)


def train_alone(module: nn.Module, optimizer: str, count: int = STEPS, late: str = "") -> list[float]:
    """The losses of one process. late: a parameter that the first step leaves out."""
    losses: list[float] = []
    inner = make_optimizer(optimizer, module)
    for tokens, target in batches(count):
        inner.zero_grad()
        loss = loss_of(module(tokens, scale=0.5)["logits"], target)
        loss.backward()  # type: ignore[no-untyped-call]
        if late and not losses:
            module.get_parameter(late).grad = None
        inner.step()
        losses.append(loss.item())
    return losses


@smp.step
def train_step(model: Any, tokens: torch.Tensor, target: torch.Tensor) -> Any:
    outputs = model(tokens, scale=0.5)
    loss = loss_of(outputs["logits"], target)
    model.backward(loss)
    return loss, outputs["states"]


def train(model: Any, optimizer: Any, data: Any) -> list[float]:
    losses = []
    for tokens, target in data:
        optimizer.zero_grad()
        loss, (mean, words) = train_step(model, tokens, target)
        optimizer.step()
        assert isinstance(mean, smp.StepOutput)
        assert words == ["words"] * smp.state.cfg.microbatches, words
        losses.append(float(loss.reduce_mean()))
    return losses


def equal(module: nn.Module, alone: nn.Module, losses: list[float], expected: list[float], what: object) -> None:
    worst = max(abs(one - other) for one, other in zip(losses, expected))
    assert worst <= TOLERANCE, (what, worst)
    reference = alone.state_dict()
    for name, value in module.state_dict().items():
        difference = (value - reference[name]).abs().max().item()
        assert difference <= TOLERANCE, (what, name, difference)


def share_of(data: Any) -> Any:
    """This replica's part of every batch."""
    replicas, mine = smp.dp_size(), smp.dp_rank()
    return [(tokens.chunk(replicas)[mine], target.chunk(replicas)[mine]) for tokens, target in data]


def as_on_a_gpu() -> None:
    """Have one thread run what autograd runs in that of a GPU: nodes whose gradients are there, and tensors' hooks.

    It works on nothing itself, and all microbatches have it in common.
    """
    device = ThreadPoolExecutor(1, "device")

    def there(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            if threading.current_thread().name.startswith("device"):
                return function(*args)
            return device.submit(torch.no_grad()(function), *args).result()

        return run

    for node in (calls.Leave, calls.Receive):
        node.backward = staticmethod(there(node.backward))  # type: ignore[method-assign]
    add_hook = module_routing.add_backward_hook
    module_routing.add_backward_hook = lambda outputs, hook: add_hook(outputs, there(hook))


def against_one_process(*optimizers: str) -> None:
    """20 steps equal those of one process: microbatches, pipelines, optimizers; overlapped or not, by replicas.

    Each pair of those is run. ALL=1: each triple.
    """
    for number, optimizer in enumerate(optimizers or ("sgd", "adam")):
        torch.manual_seed(0)
        fresh = Net()
        alone = copy.deepcopy(fresh)
        expected = train_alone(alone, optimizer)
        most = BATCH // smp.dp_size()
        triples = itertools.product((1, 4, 8), ("simple", "interleaved"))
        for index, (microbatches, pipeline) in enumerate(triples):
            other = (index + index // 2 + number) % 2  # every second one, from row to row another
            if microbatches > most or (other and not os.environ.get("ALL")):
                continue
            configure(microbatches=microbatches, pipeline=pipeline)
            module = copy.deepcopy(fresh)
            inner = make_optimizer(optimizer, module)
            model = smp.DistributedModel(module, overlapping_allreduce=pipeline == "interleaved", bucket_cap_mb=0)
            losses = train(model, smp.DistributedOptimizer(inner), share_of(batches()))
            losses = [sum(parts) / len(parts) for parts in zip(*smp.allgather(losses, smp.DP_GROUP))]
            equal(model, alone, losses, expected, (optimizer, microbatches, pipeline))
    ranks = smp.allgather(smp.pp_rank())
    assert len(set(ranks)) == smp.pp_size(), ranks
    print(f"equal: stage {smp.pp_rank()} on {socket.gethostname()}\n", end="")


def manual() -> None:
    """Modules where the script puts them; modules without a partition are on the default partition."""
    configure(auto_partition=False, default_partition=smp.pp_size() - 1, microbatches=2)
    torch.manual_seed(0)
    alone = Net()
    torch.manual_seed(0)
    with smp.partition(0):
        module = Net()
    block: Any = module.blocks[2]
    smp.set_partition(block, 1)
    block[0] = copy.deepcopy(alone.blocks[2])[0]  # type: ignore[index]  # made outside: it has no partition of its own
    model = smp.DistributedModel(module)
    expected = train_alone(alone, "sgd")
    placed: list[str] = []
    model.register_post_partition_hook(lambda model, _: placed.extend(name for name, _ in model.local_named_modules()))
    losses = train(model, make_optimizer("sgd", module), batches())
    equal(model, alone, losses, expected, "manual")
    names = {name for name, _ in module.named_modules()}
    second = {"blocks.2", "blocks.2.0"}
    wanted = {0: names - second, 1: second}
    assert set(placed) == wanted.get(smp.pp_rank(), set()), placed
    print("manual")


class Random(nn.Module):
    """A tree of modules drawn at random: containers of several kinds, skips, re-use, nesting, branches on values."""

    def __init__(self, draw: random.Random, depth: int) -> None:
        super().__init__()
        self.kind = draw.choice(("chain", "residual", "twice", "fork", "branch"))
        count = draw.randint(1, 3)
        leaf = depth == 0
        self.parts = nn.ModuleList(self._leaf(draw) if leaf else Random(draw, depth - 1) for _ in range(count))
        self.sequence = nn.Sequential(*(self._leaf(draw) for _ in range(draw.randint(0, 3))))
        self.weight = nn.Parameter(torch.rand(8, generator=torch.Generator().manual_seed(draw.randint(0, 99))))

    @staticmethod
    def _leaf(draw: random.Random) -> nn.Module:
        return draw.choice((lambda: nn.Linear(8, 8), lambda: nn.LayerNorm(8), nn.Tanh, nn.ReLU))()

    def forward(self, value: Any, flag: bool = True) -> Any:
        value = value["value"] if isinstance(value, dict) else value
        first = value
        for part in self.parts:
            result = part({"value": value}, flag) if isinstance(part, Random) else part(value * 1.0)
            value = result[1] if isinstance(result, tuple) else result
            if self.kind == "residual":
                value = value + first
        if self.kind == "twice":
            result = self.parts[0](value * 0.5)
            value = result[1] if isinstance(result, tuple) else result
        if self.kind == "branch" and flag:
            value = value * self.weight
        value = self.sequence(value * 1.0)
        return ("unused", value, {"first": first}) if self.kind == "fork" else value


def tree(seed: int) -> nn.Module:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    module = Random(draw, draw.randint(1, 2))
    linears = [part for part in module.modules() if isinstance(part, nn.Linear)]
    if len(linears) > 2 and draw.random() < 0.5:
        linears[-1].weight = linears[0].weight
    return module


def value_of(outputs: Any) -> torch.Tensor:
    value: torch.Tensor = outputs[1] if isinstance(outputs, tuple) else outputs
    return value


@smp.step
def value_step(model: Any, data: torch.Tensor) -> Any:
    loss = value_of(model(data, flag=True)).square().mean()
    model.backward(loss)
    return loss


def random_models(first: str, count: str) -> None:
    """Trees drawn at random have the gradients that they have alone, wherever the cuts are."""
    compared, seed = 0, int(first)
    while compared < int(count):
        seed += 1
        module = tree(seed)
        names = [name for name, _ in module.named_modules()]
        if len(names) < 2 * smp.pp_size() or not any(p.requires_grad for p in module.parameters()):
            continue
        alone, draw = copy.deepcopy(module), random.Random(seed)
        by_hand = bool(seed % 2)
        configure(microbatches=2, auto_partition=not by_hand, default_partition=0)
        if by_hand:
            for part in module.modules():
                smp.set_partition(part, draw.randrange(smp.pp_size()))
        data = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        model = smp.DistributedModel(module)
        loss = value_step(model, data).reduce_mean()
        expected = value_of(alone(data, flag=True)).square().mean()
        expected.backward()  # type: ignore[no-untyped-call]
        assert abs(float(loss) - float(expected)) <= TOLERANCE * max(1.0, float(expected)), (seed, loss, expected)
        gradients = {name: p.grad for name, p in alone.named_parameters()}
        for name, parameter in model.local_named_parameters():
            want = gradients[name]
            if want is None:
                assert parameter.grad is None or not parameter.grad.any(), (seed, name)
            else:
                assert parameter.grad is not None, (seed, name)
                assert torch.allclose(parameter.grad, want, rtol=1e-5, atol=1e-6), (seed, name)
        compared += 1
    print("random")


def dropout() -> None:
    """The same seed gives the same losses, however work is interleaved, with activations computed again or not."""
    seen = []
    for checkpointed in (False, True, False):
        # Cut by operations alone: by memory, another partition would suit the one that computes again.
        configure(microbatches=4, deterministic_server=True, memory_weight=0.0)
        torch.manual_seed(0)
        module = Net(dropout=0.3)
        if checkpointed:
            for block in module.blocks:
                smp.set_activation_checkpointing(block, strategy="contiguous")
        model = smp.DistributedModel(module)
        smp.state.stage.steps = 0  # as in a process of its own
        seen.append(train(model, make_optimizer("sgd", module), batches(5)))
    assert seen[0] == seen[2], seen
    assert max(abs(one - other) for one, other in zip(seen[0], seen[1])) < TOLERANCE, seen
    print("dropout")


def resumed_dropout(path: str) -> None:
    """A job of the same seed that resumes from a partial checkpoint draws the numbers of one that goes on."""

    def start() -> Callable[[], list[float]]:
        configure(microbatches=2, deterministic_server=True)
        torch.manual_seed(0)
        module = Net(dropout=0.3)
        optimizer = smp.DistributedOptimizer(make_optimizer("sgd", module))
        model = smp.DistributedModel(module)
        smp.state.stage.steps = 0  # as in a process of its own
        smp.state.stage.resume(0)
        return lambda: train(model, optimizer, batches(3))

    fit = start()
    fit()
    smp.save_checkpoint(Path(path, "dropout"), "tag", True, *wrapped())
    wanted = fit()
    smp.resume_from_checkpoint(Path(path, "dropout"), "tag")
    assert fit() == wanted
    fit = start()
    smp.resume_from_checkpoint(Path(path, "dropout"), "tag")
    assert fit() == wanted
    fit = start()
    fit()
    assert fit() == wanted  # the losses are those of a job that was not interrupted
    print("drops")


class Drifts(nn.Module):
    """What it gives depends on how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        self.calls = 0

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layers(value) * self.calls  # type: ignore[no-any-return]


def verified() -> None:
    """Steps are run again without stages: with dropout, activations computed again, and gradients that add up."""
    smp.state.verify_steps = smp.state.stage.steps + 6
    for pipeline in ("simple", "interleaved"):
        configure(microbatches=4, pipeline=pipeline)
        module = Net(dropout=0.3)
        for block in module.blocks:
            smp.set_activation_checkpointing(block, strategy="contiguous")
        model = smp.DistributedModel(module)
        for tokens, target in batches(3):
            train_step(model, tokens, target)
    smp.state.verify_steps = smp.state.stage.steps + 1
    configure(microbatches=2)
    model = smp.DistributedModel(Drifts())

    @smp.step
    def step(model: Any, data: torch.Tensor) -> Any:
        loss = model(data).square().mean()
        model.backward(loss)
        return loss

    try:
        step(model, torch.ones(4, 8))
    except smp.exceptions.SMPRuntimeError as error:
        print(f"refused: {error}")
    else:
        raise AssertionError("a difference was not found")


def delayed() -> None:
    """Constructed without memory: the values do not depend on the number of stages, and the optimizer knows them."""
    configure(microbatches=2)
    torch.manual_seed(0)
    with smp.delay_param_initialization():
        module = nn.Sequential(*(nn.Linear(100, 100) for _ in range(6)))
    assert all(layer.weight.is_meta for layer in module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(module.parameters(), 0.1))
    model = smp.DistributedModel(module)

    @smp.step
    def step(model: Any, data: torch.Tensor) -> Any:
        loss = model(data).square().mean()
        model.backward(loss)
        return loss

    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(float(step(model, torch.ones(4, 100)).reduce_mean()))
        optimizer.step()
    assert losses[0] > losses[1] > losses[2], losses
    print(f"delayed {losses[0]:.7f}\n", end="")


def checkpoints(path: str) -> None:
    """Partial and full ones resume where they were saved, each rank on its own host; plain PyTorch loads full ones."""
    smp.state.local_rank, stages = 0, range(smp.pp_size())
    for partial in (True, False):
        directory = Path(path, "partial" if partial else "full")
        configure(microbatches=2)
        torch.manual_seed(0)
        module = Net()
        optimizer = smp.DistributedOptimizer(make_optimizer("adam", module))
        model = smp.DistributedModel(module)
        train(model, optimizer, batches(3))
        for tag in ("one", "two", "three"):
            smp.save_checkpoint(
                directory, tag, partial, model, optimizer, {"epoch": tag}, num_kept_partial_checkpoints=2
            )
        smp.save_checkpoint(directory, "other", not partial, model, optimizer)
        wanted = train(model, optimizer, batches(3))
        if partial:
            names = sorted(file.name for file in directory.glob("*_partial/*"))
            assert names == sorted(
                2
                * [
                    "stages.json",
                    "user_content.pt",
                    *map("model_{}_0_0.safetensors".format, stages),
                    *map("optimizer_{}_0_0.safetensors".format, stages),
                ]
            )
        elif smp.rank() == 0:
            Net().load_state_dict(torch.load(directory / "three"))
        assert smp.resume_from_checkpoint(directory, "two", partial) == {"epoch": "two"}
        assert wanted == resume(directory, partial), partial
    own = Path(path, f"host{smp.rank()}")  # a file system that no other rank sees
    smp.save_checkpoint(own, "three", True, *wrapped(), {"epoch": "three"})
    assert len(list(own.glob("three_partial/*"))) == (4 if smp.dp_rank() == 0 else 2)
    assert Path(path, "full", "user_content_three").is_file()
    print("checkpoints")


def resume(directory: Path, partial: bool) -> list[float]:
    configure(microbatches=2)
    torch.manual_seed(1)
    module = Net()
    optimizer = smp.DistributedOptimizer(make_optimizer("adam", module))
    model = smp.DistributedModel(module)
    content = smp.resume_from_checkpoint(directory, None, partial)
    assert content == {"epoch": "three"}, content
    return train(model, optimizer, batches(3))


def resharded(path: str) -> None:
    """A partial checkpoint of another number of stages: prints the losses after it."""
    losses = " ".join(f"{loss:.5f}" for loss in resume(Path(path, "partial"), True))
    print(f"resharded {losses}\n", end="")  # in one write: mpirun mixes those of several ranks


def shards(path: str) -> None:
    """Sharded states after a resume, with a GradScaler, when a further parameter trains: those of one process."""
    torch.manual_seed(0)
    module = Net()
    alone, late = copy.deepcopy(module), "blocks.1.3.weight"
    expected = train_alone(alone, "adam", 5, late)
    configure(microbatches=2, shard_optimizer_state=True)
    optimizer = smp.DistributedOptimizer(make_optimizer("adam", module))
    model, scaler = smp.DistributedModel(module), smp.amp.GradScaler(enabled=False)

    losses = []
    for number, data in enumerate(share_of(batches(5))):
        optimizer.zero_grad()
        losses.append(float(train_step(model, *data)[0].reduce_mean()))
        if number == 0:
            module.get_parameter(late).grad = None
        scaler.step(optimizer if number else optimizer.optimizer)
        if number % 2 == 0:
            smp.save_checkpoint(Path(path, "shards"), str(number), number == 0, model, optimizer)
            smp.resume_from_checkpoint(Path(path, "shards"), str(number), number == 0)
    losses = [sum(parts) / len(parts) for parts in zip(*smp.allgather(losses, smp.DP_GROUP))]
    equal(model, alone, losses, expected, "shards")
    kept = len(optimizer.local_state_dict(gather_if_shard=False)["state"])
    assert sum(smp.allgather(kept, smp.RDP_GROUP)) == len(optimizer.local_state_dict()["state"]) > kept, kept
    print("shards")


def mixed(path: str) -> None:
    """One stage has bf16 parameters, the other none: resumed after a step or before the first, it goes on alike."""
    configure(microbatches=2, bf16=True, auto_partition=False, default_partition=0)

    @smp.step
    def step(model: Any, data: torch.Tensor) -> Any:
        loss = model(data).float().square().mean()
        model.backward(loss)
        return loss

    def start() -> Callable[[], list[float]]:
        smp.state.model = smp.state.optimizer = None
        module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        module[0].register_forward_pre_hook(lambda _, args: (args[0].float(),))
        module[0].register_forward_hook(lambda _, __, output: output.bfloat16())
        smp.set_partition(module[1], 1)
        optimizer = smp.DistributedOptimizer(torch.optim.Adam(module.parameters(), 1e-3))
        model = smp.DistributedModel(module)
        assert module[1].weight.dtype == torch.bfloat16
        module[0].float()

        def fit() -> list[float]:
            losses = []
            for _ in range(8):
                optimizer.zero_grad()
                losses.append(float(step(model, torch.ones(4, 8)).reduce_mean()))
                optimizer.step()
            return losses

        return fit

    torch.manual_seed(0)
    for partial in (True, False):
        fit = start()
        fit()
        smp.save_checkpoint(Path(path, "mixed"), "tag", partial, *wrapped())
        wanted = fit()
        smp.resume_from_checkpoint(Path(path, "mixed"), "tag", partial)
        assert fit() == wanted, partial
        fit = start()
        smp.resume_from_checkpoint(Path(path, "mixed"), "tag", partial)
        assert fit() == wanted, partial
        smp.resume_from_checkpoint(Path(path, "mixed"), "tag", partial, load_optimizer=False)
        assert fit()[0] == wanted[0], partial
    print("mixed")


def released() -> None:
    """What was loaded before the first step is not kept after it."""
    configure(microbatches=2)
    module = Net()
    optimizer, model = smp.DistributedOptimizer(make_optimizer("adam", module)), smp.DistributedModel(module)
    loaded = [{**optimizer.local_state_dict(), "kept": Partly()}, {**module.state_dict(), "kept": Partly()}]
    kept = [weakref.ref(part["kept"]) for part in loaded]
    optimizer.load_state_dict(loaded[0])
    model.load_state_dict(loaded[1], strict=False)
    loaded.clear()
    train(model, optimizer, batches(1))
    assert [part() for part in kept] == [None, None]
    print("released")


def options() -> None:
    """Accumulation, clipping, losses scaled for half precision, sharded optimizer states."""
    torch.manual_seed(0)
    alone = Net()
    fresh = copy.deepcopy(alone)
    inner = make_optimizer("adam", alone)
    for _ in range(2):
        inner.zero_grad()
        for tokens, target in batches(2):
            loss_of(alone(tokens, scale=0.5)["logits"], target).backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        inner.step()
    configure(microbatches=2, shard_optimizer_state=True)
    module = copy.deepcopy(fresh)
    optimizer = smp.DistributedOptimizer(make_optimizer("adam", module), static_loss_scale=1024.0)
    model = smp.DistributedModel(module, backward_passes_per_step=2)

    @smp.step
    def scaled_step(model: Any, tokens: torch.Tensor, target: torch.Tensor) -> None:
        optimizer.backward(loss_of(model(tokens, scale=0.5)["logits"], target))

    for _ in range(2):
        optimizer.zero_grad()
        for tokens, target in share_of(batches(2)):
            scaled_step(model, tokens, target)
        optimizer.update_master_grads()
        found = optimizer.clip_master_grads(0.1)
        optimizer.step()
    assert abs(found - float(norm)) < 1e-5, (found, norm)
    equal(model, alone, [0.0], [0.0], "options")
    kept = sum(len(entry) for entry in optimizer.local_state_dict(gather_if_shard=False)["state"].values())
    whole = sum(len(entry) for entry in optimizer.local_state_dict()["state"].values())
    assert kept < whole or smp.rdp_size() == 1, (kept, whole)
    print("options")


def habits() -> None:
    """What scripts do beside the examples: fewer passes than were announced, layers unfrozen or exchanged later."""

    def fit(module: Any, inner: Any, run: Callable[..., None], clip: Callable[[], Any], data: Any) -> None:
        module.blocks[1].requires_grad_(False)
        for number, passes in enumerate((3, 1, 2)):
            inner.zero_grad()
            for tokens, target in data[:passes]:
                run(tokens, target)
            clip()
            inner.step()
            if number == 0:
                module.blocks[1].requires_grad_(True)

    torch.manual_seed(0)
    alone = Net()
    alone.head = nn.Linear(24, 50)
    fresh, data = copy.deepcopy(alone), batches(3)

    def run_alone(tokens: torch.Tensor, target: torch.Tensor) -> None:
        loss_of(alone(tokens, scale=0.5)["logits"], target).backward()  # type: ignore[no-untyped-call]

    by_norm: list[Callable[[Any], Any]] = [
        lambda model: clip_grad_norm_(model.parameters(), 0.05),
        lambda model: model.clip_grad_norm_(0.05),
        lambda model: smp.state.optimizer.clip_master_grads(0.05),  # type: ignore[union-attr]
    ]
    fit(alone, make_optimizer("sgd", alone), run_alone, lambda: by_norm[0](alone), data)
    for clip in by_norm:
        configure(microbatches=2)
        module = copy.deepcopy(fresh)
        module.head = nn.Linear(24, 50)
        model = smp.DistributedModel(module, backward_passes_per_step=2)
        module.head = copy.deepcopy(fresh.head)  # after the wrapping, before the first step
        optimizer = smp.DistributedOptimizer(make_optimizer("sgd", module))

        def run(tokens: torch.Tensor, target: torch.Tensor, model: Any = model) -> None:
            train_step(model, tokens, target)

        fit(module, optimizer, run, functools.partial(clip, model), share_of(data))
        equal(model, alone, [0.0], [0.0], "habits")
    print("habits")


def half() -> None:
    """fp16 casts the model, its positional inputs and outputs; a dynamic scale halves until nothing overflows.

    Losses are scaled once, whether the script calls the model's backward or the optimizer's.
    """
    torch.manual_seed(0)
    fresh = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    alone = copy.deepcopy(fresh)
    inner = torch.optim.SGD(alone.parameters(), 0.5)
    expected = []
    for _ in range(10):
        inner.zero_grad()
        loss = alone(torch.ones(4, 8)).square().mean()
        loss.backward()
        clip_grad_norm_(alone.parameters(), 1.0)
        inner.step()
        expected.append(loss.item())

    @smp.step
    def half_step(model: Any, optimizer: Any, data: torch.Tensor) -> Any:
        output = model(data)
        assert output.dtype == torch.float32, output.dtype
        loss = output.square().mean()
        (model if smp.state.stage.steps % 2 else optimizer).backward(loss)
        return loss

    for arguments in ({"static_loss_scale": 128.0}, {"dynamic_loss_scale": True}):
        configure(microbatches=2, fp16=True)
        module = copy.deepcopy(fresh)
        scale: Any = {"dynamic_loss_args": {"init_scale": 2.0**24, "scale_window": 3, "delayed_shift": 2}}
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(module.parameters(), 0.5), **arguments, **scale)
        model = smp.DistributedModel(module)
        losses, skipped, scales = [], 0, []
        for _ in range(30):
            optimizer.zero_grad()
            loss = half_step(model, optimizer, torch.ones(4, 8)).reduce_mean()
            norm = optimizer.clip_master_grads(1.0)
            assert (norm == -1.0) == optimizer.overflow, norm
            skipped += optimizer.overflow
            if not optimizer.overflow:
                losses.append(float(loss))
            optimizer.step()
            scales.append(optimizer.loss_scale)
        assert {p.dtype for p in model.local_parameters()} == {torch.float16}
        assert set(module.state_dict()) == set(alone.state_dict())
        assert len(set(smp.allgather((skipped, tuple(scales))))) == 1
        if arguments.get("dynamic_loss_scale"):
            assert scales[:2] == [2.0**24, 2.0**23], scales  # two overflows for the first
            assert 0 < skipped < 25, skipped
        else:
            assert skipped == 0, skipped
        worst = max(abs(one - other) for one, other in zip(losses, expected))
        assert worst < 0.01, (worst, arguments, losses[:10], expected)
    print("half")


def gathered() -> None:
    """The whole model is on every stage after `cpu()`, and trains on as if it had not been."""
    torch.manual_seed(0)
    alone = Net()
    configure(microbatches=2)
    module = copy.deepcopy(alone)
    model, optimizer = smp.DistributedModel(module), make_optimizer("sgd", module)
    losses, expected = train(model, optimizer, batches(2)), train_alone(alone, "sgd", 4)
    whole = model.state_dict()
    assert model.cpu() is model
    found = module.state_dict()
    assert all(torch.equal(found[name], value) for name, value in whole.items())
    kept = sum(parameter.numel() for parameter in module.parameters())
    losses += train(model, optimizer, batches(4)[2:])
    equal(model, alone, losses, expected, "gathered")
    assert sum(parameter.numel() for parameter in module.parameters()) < kept
    print("gathered")


def ranks() -> None:
    """Objects between ranks, by every kind of rank."""
    me, everybody = smp.rank(), list(range(smp.size()))
    assert smp.allgather({"rank": me}) == [{"rank": rank} for rank in everybody]
    smp.send(torch.arange(3) + me, (smp.pp_rank() + 1) % smp.pp_size(), smp.RankType.PP_RANK)
    before = (smp.pp_rank() - 1) % smp.pp_size()
    got = smp.recv_from(before, smp.RankType.PP_RANK)
    assert torch.equal(got, torch.arange(3) + smp.get_pp_group()[before]), got
    if me == 1:
        smp.broadcast(["hello", me])
    else:
        assert smp.recv_from(1) == ["hello", 1]
    smp.barrier()
    smp.mp_barrier()
    smp.dp_barrier()
    assert smp.mp_size() * smp.rdp_size() == smp.pp_size() * smp.dp_size() == smp.size()
    try:
        smp.send(1, 99)
    except ValueError as error:
        assert "Allowed: 0 to " in str(error)
    print("ranks")


def backends() -> None:
    """Every group has the backend that the configuration says."""
    names = ("world", "mp", "dp", "pp", "tp", "rdp")
    groups = [getattr(smp, f"get_{name}_process_group")() for name in names]
    found = {dist.get_backend(group) for group in groups}
    sizes = [smp.size(), smp.mp_size(), smp.dp_size(), smp.pp_size(), smp.tp_size(), smp.rdp_size()]
    assert [dist.get_world_size(group) for group in groups] == sizes
    print(f"backends {' '.join(found)}\n", end="")


def misuse() -> None:
    """Every rank raises, and says what and where."""
    configure(microbatches=4)
    model = smp.DistributedModel(Net())
    for call in (lambda: model(torch.zeros(1)), lambda: model.backward(torch.zeros(1)), model.local_parameters):
        try:
            call()
        except smp.exceptions.StepUsageError as error:
            print(error)
    tokens, target = batches(1)[0]
    try:
        train_step(model, tokens[:6], target[:6])
    except RuntimeError as error:
        print(error)


def first_stage_alone(case: str) -> None:
    """What a step's body does for its own stage alone, and would be silently missing on the others, is an error."""
    configure(microbatches=2)
    module = Net()
    model, optimizer = smp.DistributedModel(module), smp.DistributedOptimizer(make_optimizer("sgd", module))

    @smp.step
    def step(model: Any, tokens: torch.Tensor, target: torch.Tensor) -> None:
        loss = loss_of(model(tokens)["logits"], target)
        if case == "penalty":
            loss = loss + sum(parameter.square().sum() for parameter in model.parameters())
        if case == "eval":
            model.eval()
        model.backward(loss)
        if case == "optimizer":
            optimizer.step()

    try:
        step(model, *batches(1)[0])
    except RuntimeError as error:
        print(error)


def joins() -> None:
    """One replica has three batches, and the other five."""
    configure()
    torch.manual_seed(0)
    module = Net()
    alone = copy.deepcopy(module)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(make_optimizer("sgd", module))
    reference, counts = torch.optim.SGD(alone.parameters(), 0.02, momentum=0.9), (3, 5)
    with model.join():
        for tokens, target in batches(counts[smp.dp_rank()]):
            optimizer.zero_grad()
            train_step(model, tokens[smp.dp_rank() :: 2], target[smp.dp_rank() :: 2])
            optimizer.step()
    for step, (tokens, target) in enumerate(batches(5)):
        reference.zero_grad()
        for replica, count in enumerate(counts):
            if step < count:
                logits = alone(tokens[replica::2], scale=0.5)["logits"]
                (loss_of(logits, target[replica::2]) / 2).backward()  # type: ignore[no-untyped-call]
        reference.step()
    wanted = dict(alone.named_parameters())
    for name, parameter in model.local_named_parameters():
        assert torch.allclose(parameter, wanted[name], atol=1e-6), name
    try:
        with model.join(throw_on_early_termination=True):
            for tokens, target in batches(counts[smp.dp_rank()]):
                train_step(model, tokens, target)
    except RuntimeError as error:
        assert "exhausted" in str(error), error
        print("joins")


def uneven() -> None:
    """Microbatches of different sizes weigh by their sizes."""
    configure(microbatches=4, uneven_microbatches=True)
    torch.manual_seed(0)
    module = Net()
    alone = copy.deepcopy(module)
    model = smp.DistributedModel(module)
    tokens, target = (part[:10] for part in batches(1)[0])
    train_step(model, tokens, target)
    loss_of(alone(tokens, scale=0.5)["logits"], target).backward()  # type: ignore[no-untyped-call]
    gradients = dict(alone.named_parameters())
    for name, parameter in model.local_named_parameters():
        want = gradients[name].grad
        assert parameter.grad is not None and want is not None, name
        assert torch.allclose(parameter.grad, want, atol=1e-6), name
    print("uneven")


class Partly(nn.Module):
    """Has a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.BatchNorm1d(8), *(nn.Linear(8, 8) for _ in range(4)))
        self.unused = nn.Linear(8, 8)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.layers(value)  # type: ignore[no-any-return]


def evaluates() -> None:
    """An evaluation leaves gradients alone, what has none keeps none, and hooks whose handles nobody keeps all run.

    All of it is verified, with buffers that differ between replicas until they are broadcast.
    """
    configure(microbatches=2)
    smp.state.verify_steps = smp.state.stage.steps + 3
    torch.manual_seed(0)
    data = torch.randn(4, 8)
    model, ran = smp.DistributedModel(Partly()), []
    for number in range(3):
        model.register_post_partition_hook(lambda *_, number=number: ran.append(number))

    @smp.step
    def evaluate(model: Any, data: torch.Tensor) -> Any:
        return model(data).mean()

    evaluate(model, data)
    assert ran == [0, 1, 2], ran
    assert all(parameter.grad is None for parameter in model.local_parameters())

    @smp.step
    def fit(model: Any, data: torch.Tensor) -> None:
        model.backward(model(data).square().mean())

    fit(model, data * (1 + smp.dp_rank()))
    trained = {name: parameter.grad is not None for name, parameter in model.local_named_parameters()}
    assert trained == {name: not name.startswith("unused") for name in trained}, trained
    kept = [parameter.grad.clone() for parameter in model.local_parameters() if parameter.grad is not None]
    model.eval()
    evaluate(model, data * (1 + smp.dp_rank()))
    now = [parameter.grad for parameter in model.local_parameters() if parameter.grad is not None]
    assert all(torch.equal(one, other) for one, other in zip(kept, now))
    same = smp.allgather([gradient.sum().item() for gradient in now], smp.DP_GROUP)
    assert all(sums == same[0] for sums in same), same
    norms = smp.allgather(float(clip_grad_norm_(model.parameters(), 0.01)), smp.WORLD)
    assert norms[0] > 0.01 and all(abs(norm - norms[0]) < 1e-6 for norm in norms), norms

    @smp.step
    def goes_around(model: Any, data: torch.Tensor) -> None:
        model(data).square().mean().backward()

    try:
        goes_around(model, data)
    except smp.exceptions.StepUsageError as error:
        assert "call model.backward(loss)" in str(error), error
        print("evaluates")


def without_fast_path() -> None:
    """torch's encoder takes the parameters of its layers' children itself in evaluation: not those of other stages."""
    configure(microbatches=2, auto_partition=False, default_partition=0)
    torch.manual_seed(0)
    alone = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2)
    module, data = copy.deepcopy(alone), torch.randn(4, 3, 8)
    padding = torch.tensor([[False, False, True]] * 4)
    smp.set_partition(module.layers[0].linear2, 1)
    smp.set_partition(module.layers[1], 1)
    model = smp.DistributedModel(module)

    @smp.step
    def evaluate(model: Any, data: torch.Tensor, padding: torch.Tensor) -> Any:
        return model(data, src_key_padding_mask=padding)

    for part in (model, alone):
        part.eval()
    with torch.no_grad():
        found, wanted = evaluate(model, data, padding).concat(), alone(data, src_key_padding_mask=padding)
    assert torch.allclose(found[:, :2], wanted[:, :2], atol=1e-6)
    print("without_fast_path")


class Fails(nn.Module):
    """Raises, or kills its process, at one of its calls."""

    def __init__(self, what: str, at: int) -> None:
        super().__init__()
        self.layer, self.what, self.left = nn.Linear(24, 24), what, at

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left == 0 and self.what == "raise":
            raise ArithmeticError("this layer fails")
        result: torch.Tensor = self.layer(value)
        if self.left == 0 and self.what == "backward":
            result.register_hook(_raise)  # type: ignore[no-untyped-call]
        return result


def _raise(_: torch.Tensor) -> None:
    raise ArithmeticError("this layer fails")


def fails(what: str, stage: str, at: str) -> None:
    """A stage raises, or is killed some milliseconds after the first step."""
    configure(microbatches=4, auto_partition=False, default_partition=0)
    torch.manual_seed(0)
    module = Net()
    smp.set_partition(module.blocks[2], 1)
    module.blocks[1] = Fails(what, int(at)) if what != "kill" else module.blocks[1]
    smp.set_partition(module.blocks[1], int(stage))
    model = smp.DistributedModel(module)
    optimizer = make_optimizer("sgd", module)
    if what == "kill":
        train(model, optimizer, batches(1))
        if smp.pp_rank() == int(stage):
            threading.Timer(int(at) / 1000, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    began = time.monotonic()
    try:
        while time.monotonic() < began + 60:
            train(model, optimizer, batches(1))
    except (RuntimeError, ArithmeticError) as error:
        seconds = time.monotonic() - began
        print(f"stage {smp.pp_rank()} raised after {seconds:.1f} s: {type(error).__name__}: {error}", flush=True)


class Slow(nn.Linear):
    """Takes its time in its first call."""

    slept = False

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        if not Slow.slept:
            Slow.slept = True
            time.sleep(2.5)
        return super().forward(value)


def stalls() -> None:
    """A module that takes long: who waits for it says so, and it says where it is."""
    configure(microbatches=2, auto_partition=False, default_partition=0)
    torch.manual_seed(0)
    module = Net()
    module.blocks[2] = Slow(24, 24)
    smp.set_partition(module.blocks[2], 1)
    train(smp.DistributedModel(module), make_optimizer("sgd", module), batches(2))
    print("stalls")


def absent() -> None:
    """A step that the first stage does not enter: the other one waits, no longer than the limit, and tells it."""
    configure(microbatches=2, auto_partition=False, default_partition=0)
    module = Net()
    smp.set_partition(module.blocks[2], 1)
    model = smp.DistributedModel(module)
    if smp.pp_rank():
        try:
            train(model, make_optimizer("sgd", module), batches(1))
        except smp.exceptions.SMPRuntimeError as error:
            print(f"says: {error}", flush=True)
    else:
        assert smp.state.stage.failures.occurred.wait(120)
        print(f"is informed: {smp.state.stage.failures.error}", flush=True)


if __name__ == "__main__":
    cases: dict[str, Callable[..., None]] = {
        case.__name__: case
        for case in (
            against_one_process,
            manual,
            random_models,
            dropout,
            delayed,
            checkpoints,
            resharded,
            shards,
            mixed,
            resumed_dropout,
        )
    }
    cases.update(
        {
            case.__name__: case
            for case in (
                options,
                habits,
                released,
                half,
                gathered,
                ranks,
                verified,
                backends,
                misuse,
                first_stage_alone,
                joins,
                uneven,
                fails,
                stalls,
                absent,
                evaluates,
                without_fast_path,
            )
        }
    )
    backend = os.environ.get("BACKEND", "auto")
    smp.init({"partitions": int(os.environ.get("STAGES", 1)), "ddp": True, "ddp_dist_backend": backend})
    if os.environ.get("AS_ON_A_GPU"):
        as_on_a_gpu()
    for case in sys.argv[1].split(","):
        cases[case](*sys.argv[2:])
