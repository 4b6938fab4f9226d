"""A rank of benchmarks/modelparallel.py: python modelparallel_ranks.py CASE [ARGUMENT ...] under mpirun."""

from __future__ import annotations

import functools
import json
import os
import resource
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.backend.config import check
from smdistributed.modelparallel.torch.pipeline.module_routing import route_calls

FORWARD_S, BACKWARD_S = 0.030, 0.060
CALL_BYTES = 64 << 10
SPLIT = {"tensor_parallel_degree": 2, "ddp": True, "prescaled_batch": True}
WORDS, WIDTH, LENGTH = 512, 256, 64


class _Busy(torch.autograd.Function):
    """A virtual accelerator: forward and backward take their time, and no core. Counts activations that are held."""

    held = most_held = 0

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        _Busy.held += 1
        _Busy.most_held = max(_Busy.held, _Busy.most_held)
        time.sleep(FORWARD_S)
        return value * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        _Busy.held -= 1
        time.sleep(BACKWARD_S)
        return gradient, torch.zeros(1)


class Accelerator(nn.Module):
    """One stage's whole model."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Busy.apply(value, self.weight)  # type: ignore[no-untyped-call]
        return result


class SplitAccelerator(Accelerator):
    """The same, with a layer that ranks share: it sends tensors between them."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = smp.nn.DistributedLinear(4, 4)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return super().forward(self.shared(value))


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        batch, length, width = value.shape
        parts = self.attention(self.norms[0](value)).view(batch, length, 3, -1, 64).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        value = value + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return value + self.narrow(functional.gelu(self.wide(self.norms[1](value))))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """A transformer that predicts words."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        value = self.embed(words)
        for block in self.blocks:
            value = block(value)
        return self.head(value)  # type: ignore[no-any-return]


def configure(**values: Any) -> None:
    """Another job in this process."""
    smp.state.cfg = check({"partitions": smp.pp_size(), **values})
    smp.state.model = smp.state.optimizer = None


def timed(action: Callable[[], Any]) -> float:
    """Seconds, after a barrier, on this rank."""
    dist.barrier()
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def print_measured(**found: Any) -> None:
    """Print the first rank's figures as JSON, for modelparallel.py."""
    if smp.rank() == 0:
        print(json.dumps(found), flush=True)


# --- the bubble


def bubble(microbatches: str, rounds: str) -> None:
    """Seconds a step: our two pipelines and torch's two, taking turns."""
    count = int(microbatches)
    ways = {"simple": ours("simple", count), "interleaved": ours("interleaved", count)}
    ways.update({"gpipe": torchs("ScheduleGPipe", count), "1f1b": torchs("Schedule1F1B", count)})
    take_turns(ways, int(rounds))


def take_turns(ways: dict[str, Callable[[], Any]], rounds: int) -> None:
    """Print the median seconds of each way, after a first call of each."""
    for way in ways.values():
        way()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            seconds[name].append(timed(way))
    print_measured(**{name: statistics.median(found) for name, found in seconds.items()})


def ours(pipeline: str, count: int, accelerator: type[Accelerator] = Accelerator, **values: Any) -> Callable[[], Any]:
    """A step of a chain of accelerators, one on each stage."""
    configure(microbatches=count, pipeline=pipeline, auto_partition=False, default_partition=0, **values)
    chain = nn.Sequential(*(accelerator() for _ in range(smp.pp_size())))
    for stage, module in enumerate(chain):
        smp.set_partition(module, stage)
    model, config = smp.DistributedModel(chain), smp.state.cfg

    @smp.step
    def step(model: Any, data: torch.Tensor) -> Any:
        loss = model(data).mean()
        model.backward(loss)
        return loss

    data = torch.ones(count, 4)

    def run() -> None:
        smp.state.cfg, smp.state.model = config, model
        route_calls(model.manager) if model.partitioned else None
        step(model, data)

    return run


def torchs(name: str, count: int) -> Callable[[], Any]:
    """The same by torch.distributed.pipelining."""
    from torch.distributed import pipelining

    stage = pipelining.PipelineStage(Accelerator(), smp.rank(), smp.size(), torch.device("cpu"))
    schedule = getattr(pipelining, name)(stage, count, loss_fn=lambda output, _: output.mean())
    data = torch.ones(count, 4)

    def run() -> None:
        first, last = smp.rank() == 0, smp.rank() == smp.size() - 1
        schedule.step(*([data] if first else []), **({"target": data} if last else {}))

    return run


def tensor_bubble(microbatches: str, rounds: str) -> None:
    """Seconds a step of two ranks for each stage, with several microbatches in flight and with one."""
    count = int(microbatches)
    active = {"several": {}, "one": {"active_microbatches": 1}}
    ways = {name: ours("interleaved", count, SplitAccelerator, **SPLIT, **some) for name, some in active.items()}
    take_turns(ways, int(rounds))


def held(microbatches: str) -> None:
    """The most microbatches with activations on the first stage at one time."""
    found = {}
    for pipeline in ("simple", "interleaved"):
        run = ours(pipeline, int(microbatches))
        run()
        _Busy.most_held = 0
        run()
        found[pipeline] = _Busy.most_held
    print_measured(**found, active=smp.state.cfg.active_microbatches)


# --- a call


class Calls(nn.Module):
    """Calls a module of the other stage many times."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count, self.other = count, nn.Identity()
        self.here = nn.Linear(1, 1)
        smp.set_partition(self.other, 1)

    def forward(self, value: torch.Tensor) -> tuple[torch.Tensor, float]:
        began = time.perf_counter()
        for _ in range(self.count):
            value = self.other(value)
        return value, (time.perf_counter() - began) / self.count


def call(rounds: str) -> None:
    """Seconds of a call of a remote module and of its backward; of a message there and one back by gloo."""
    configure(auto_partition=False, default_partition=0)
    count = 50
    model = smp.DistributedModel(Calls(count))

    @smp.step
    def step(model: Any, data: torch.Tensor) -> Any:
        value, seconds = model(data)
        began = time.perf_counter()
        model.backward(value.sum())
        return seconds, (time.perf_counter() - began) / count

    data = torch.ones(1, CALL_BYTES // 4, requires_grad=True)
    step(model, data)
    found: dict[str, list[float]] = {"forward": [], "backward": [], "bare": []}
    for _ in range(int(rounds)):
        forward, backward = step(model, data)
        found["forward"].append(forward[0])
        found["backward"].append(backward[0])
        found["bare"].append(bare(count))
    print_measured(**{name: statistics.median(seconds) for name, seconds in found.items()})


def bare(count: int) -> float:
    """Seconds of a message to the other rank and one back, by torch.distributed on gloo."""
    message = torch.ones(CALL_BYTES // 4)
    dist.barrier()
    began = time.perf_counter()
    for _ in range(count):
        for sender in (0, 1):
            if smp.rank() == sender:
                dist.send(message, 1 - sender)
            else:
                dist.recv(message, sender)
    return (time.perf_counter() - began) / count


# --- throughput


def loss_of(model: Any, words: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(words).flatten(0, 1), words.flatten())


def throughput(microbatches: str, rounds: str) -> None:
    """Seconds a step on two stages of a thread each, and on one process of two threads meanwhile alone."""
    count = int(microbatches)
    torch.manual_seed(0)
    alone, module = GPT(8, WIDTH), GPT(8, WIDTH)
    configure(microbatches=count, memory_weight=0.0)
    model = smp.DistributedModel(module)
    words = torch.randint(0, WORDS, (count * 2, LENGTH))

    @smp.step
    def step(model: Any, words: torch.Tensor) -> Any:
        loss = loss_of(model, words)
        model.backward(loss)
        return loss

    def unsplit() -> None:
        if smp.rank():
            return
        torch.set_num_threads(2)
        for part in words.chunk(count):
            loss_of(alone, part).backward()  # type: ignore[no-untyped-call]
        torch.set_num_threads(1)

    seconds: dict[str, list[float]] = {"split": [], "unsplit": []}
    for round_ in range(int(rounds) + 1):
        split, whole = timed(lambda: step(model, words)), timed(unsplit)
        if round_:
            seconds["split"].append(split)
            seconds["unsplit"].append(whole)
    print_measured(**{name: statistics.median(found) for name, found in seconds.items()})


# --- memory


def memory(blocks: str, width: str) -> None:
    """The most bytes of memory that a rank had beyond what it has without a model: two steps with Adam."""
    before = peak()
    configure(microbatches=2, memory_weight=1.0)
    with smp.delay_param_initialization(smp.size() > 1):
        module = GPT(int(blocks), int(width))
    parameters = sum(parameter.numel() for parameter in module.parameters())
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(module.parameters(), 1e-4, foreach=False))
    model = smp.DistributedModel(module)

    @smp.step
    def step(model: Any, words: torch.Tensor) -> Any:
        loss = loss_of(model, words)
        model.backward(loss)
        return loss

    for _ in range(2):
        optimizer.zero_grad()
        step(model, torch.zeros(2, 8, dtype=torch.long))
        optimizer.step()
    print_measured(most=max(smp.allgather(peak() - before)), parameters=parameters)


def shares_memory(is_sharded: str, blocks: str, width: str) -> None:
    """The same of a replica with bf16: parameters, their copies, and Adam. `is_sharded`: of the optimizer's state."""
    before = peak()
    configure(partitions=1, ddp=True, bf16=True, shard_optimizer_state=bool(is_sharded))
    module = GPT(int(blocks), int(width)).bfloat16()
    inner = torch.optim.Adam(module.parameters(), 1e-4, foreach=False)
    model, optimizer = smp.DistributedModel(module), smp.DistributedOptimizer(inner)
    for _ in range(2):
        optimizer.zero_grad()
        model.backward(loss_of(model, torch.zeros(2, 8, dtype=torch.long)))
        optimizer.step()
    print_measured(most=max(smp.allgather(peak() - before)))


# --- sharded data parallelism


def sharded_memory(way: str, blocks: str, width: str) -> None:
    """The most bytes of memory that a rank had beyond what it has without a model: two steps of `WAYS[way]`."""
    before = peak()
    job = WAYS[way](int(blocks), int(width))
    for _ in range(2):
        job.step()
    print_measured(most=max(smp.allgather(peak() - before)))


def sharded_step(blocks: str, width: str, rounds: str) -> None:
    """Seconds of a step of each way; they take turns."""
    time_sharded({name: way(int(blocks), int(width)).step for name, way in WAYS.items()}, int(rounds))


def sharded_least(blocks: str, width: str, rounds: str) -> None:
    """Seconds of a step without any communication: each rank has the whole model, and updates its share."""
    module = GPT(int(blocks), int(width))
    share = list(module.parameters())[smp.rank() :: smp.size()]
    optimizer = torch.optim.Adam(share, 1e-4, foreach=False)

    def step() -> None:
        module.zero_grad()
        loss_of(module, torch.zeros(2, 8, dtype=torch.long)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    time_sharded({"least": step}, int(rounds))


def time_sharded(steps: dict[str, Callable[[], Any]], rounds: int) -> None:
    """Print the median seconds of the slowest rank, after a first call of each step. They take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(rounds + 1):
        for name, step in steps.items():
            found = timed(step)
            if round_:
                seconds[name].append(max(smp.allgather(found)))
    print_measured(**{name: statistics.median(found) for name, found in seconds.items()})


def checkpoint(blocks: str, width: str, directory: str, rounds: str) -> None:
    """Seconds to save a model with Adam's state, and to resume from it, of each way; they take turns.

    What was written is still in the memory of the host when it is read.
    """
    jobs = {name: way(int(blocks), int(width)) for name, way in WAYS.items()}
    for job in jobs.values():
        job.step()
    seconds: dict[str, list[float]] = {f"{name}_{what}": [] for name in jobs for what in ("save", "resume")}
    for _ in range(int(rounds)):
        for name, job in jobs.items():
            path = Path(directory, name)
            for what, action in (("save", job.save), ("resume", job.resume)):
                seconds[f"{name}_{what}"].append(max(smp.allgather(timed(functools.partial(action, path)))))
            dist.barrier()
            if smp.rank() == 0:
                shutil.rmtree(path)
            dist.barrier()
    print_measured(**{name: statistics.median(found) for name, found in seconds.items()})


@dataclass(frozen=True)
class Sharded:
    """A job with a GPT that is split over all ranks, and Adam."""

    step: Callable[[], Any]
    save: Callable[[Path], Any]
    resume: Callable[[Path], Any]


def sharded_by_us(blocks: int, width: int) -> Sharded:
    """By `sharded_data_parallel_degree`."""
    configure(partitions=1, ddp=True, sharded_data_parallel_degree=smp.size(), sdp_gradient_clipping=0)
    with smp.delay_param_initialization():
        module = GPT(blocks, width)
    inner = torch.optim.Adam(module.parameters(), 1e-4, foreach=False)
    model, optimizer = smp.DistributedModel(module), smp.DistributedOptimizer(inner)

    def run() -> None:
        optimizer.zero_grad()
        model.backward(loss_of(model, torch.zeros(2, 8, dtype=torch.long)))
        optimizer.step()

    def resume(path: Path) -> None:
        smp.state.model, smp.state.optimizer = model, optimizer
        smp.resume_from_checkpoint(path, "tag")

    return Sharded(run, lambda path: smp.save_checkpoint(path, "tag", True, model, optimizer), resume)


def sharded_by_torch(blocks: int, width: int) -> Sharded:
    """By FSDP2 on gloo, and torch.distributed.checkpoint."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(dist.new_group(backend="gloo"), "cpu")
    with torch.device("meta"):
        module = GPT(blocks, width)
    for block in module.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    module.to_empty(device="cpu")
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.02)
    optimizer = torch.optim.Adam(module.parameters(), 1e-4, foreach=False)

    def run() -> None:
        optimizer.zero_grad()
        loss_of(module, torch.zeros(2, 8, dtype=torch.long)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    def parts() -> dict[str, Any]:
        return dict(zip(("model", "optimizer"), get_state_dict(module, optimizer), strict=True))

    def resume(path: Path) -> None:
        found = parts()
        load(found, checkpoint_id=path)
        set_state_dict(module, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])

    return Sharded(run, lambda path: save(parts(), checkpoint_id=path), resume)


WAYS = {"smp": sharded_by_us, "fsdp2": sharded_by_torch}


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    on_stages: tuple[Callable[..., None], ...] = (bubble, tensor_bubble, held, call, throughput, memory)
    on_replicas: tuple[Callable[..., None], ...] = (
        sharded_memory,
        sharded_step,
        sharded_least,
        checkpoint,
        shares_memory,
    )
    has_replicas = sys.argv[1] in [case.__name__ for case in on_replicas]
    split = SPLIT if sys.argv[1] == "tensor_bubble" else {}
    stages = 1 if has_replicas else int(os.environ["OMPI_COMM_WORLD_SIZE"]) // (2 if split else 1)
    smp.init({"partitions": stages, "ddp": stages == 1, **split})
    cases = {case.__name__: case for case in (*on_stages, *on_replicas)}
    cases[sys.argv[1]](*sys.argv[2:])
