"""One rank of benchmarks/gpu.py. `gpu_ranks.py DIRECTORY ROUNDS BYTES DEVICE`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401 (registers the backend)
from smdistributed.core import timeline
from smdistributed.core.torch.devices import Staged

WARM_UP = 2
RECORDED_STEPS = 5
LAYERS = 8


def main(words: Sequence[str]) -> None:
    """Measure what this number of ranks is for, and write it down."""
    directory, rounds, size, device = Path(words[0]), int(words[1]), int(words[2]), torch.device(words[3])
    dist.init_process_group(backend="smddp")
    torch.manual_seed(0)
    if dist.get_world_size() == 1:
        times = {"all-reduce": measure(device, all_reduces(device, size), rounds)}
    else:
        steps = {name: step(device, size, name == "fp16") for name in ("fp16", "fp32")}
        times = {"staging": measure(device, staging(device, size), rounds), "amp": measure(device, steps, rounds)}
        for name, run in steps.items():
            record(device, run, directory / name)
    if dist.get_rank() == 0:
        (directory / f"times-{dist.get_world_size()}.json").write_text(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()


def all_reduces(device: torch.device, size: int) -> dict[str, Callable[[], object]]:
    """The backend, and torch's own group for the device."""
    tensor = torch.zeros(size // 4, device=device)
    own = dist.new_group(backend="nccl" if device.type == "cuda" else "gloo")
    return {"smddp": lambda: dist.all_reduce(tensor), "torch": lambda: dist.all_reduce(tensor, group=own)}


def staging(device: torch.device, size: int) -> dict[str, Callable[[], object]]:
    """What ranks do that share a device, and its copies alone."""
    tensor = torch.zeros(size // 4, device=device)
    host = torch.empty(size // 4, pin_memory=device.type == "cuda")
    staged = carrier(device)
    options = dist.AllreduceOptions()

    def copies() -> None:
        host.copy_(tensor)
        tensor.copy_(host)

    return {"smddp": lambda: staged.allreduce([tensor], options), "copies": copies}


def carrier(device: torch.device) -> Any:
    """What carries tensors on the device where ranks share it."""
    group: Any = dist.group.WORLD
    if device.type != "cuda":
        return Staged(group)
    found = group._cuda()
    if not isinstance(found, Staged):
        raise SystemExit("The ranks do not share a device: they would be measured with NCCL.")
    return found


def step(device: torch.device, size: int, compressed: bool) -> Callable[[], object]:
    """A step of an MLP whose gradients, as float32, are about `size` bytes, under autocast."""
    width = max(16, int((size / 4 / LAYERS) ** 0.5))
    layers = [torch.nn.Linear(width, width, device=device) for _ in range(LAYERS)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=max(size / LAYERS / (1 << 20), 0.001))
    if compressed:
        model.register_comm_hook(None, fp16_compress_hook)
    batch = torch.randn(64, width, device=device)
    low = torch.float16 if device.type == "cuda" else torch.bfloat16

    def run() -> None:
        with torch.autocast(device.type, dtype=low):
            loss = model(batch).float().square().mean()
        loss.backward()
        model.zero_grad(set_to_none=False)

    return run


def record(device: torch.device, run: Callable[[], object], directory: Path) -> None:
    """Record a few steps into the directory."""
    dist.barrier()
    timeline.start(directory, dist.get_rank(), 2, default_name="smdataparallel_timeline.json", append_rank=True)
    for _ in range(RECORDED_STEPS):
        run()
    synchronize(device)
    timeline.stop()


def measure(device: torch.device, runs: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each; they take turns, and a round counts for its slowest rank."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(WARM_UP + rounds):
        for name, run in runs.items():
            synchronize(device)
            dist.barrier()
            began = time.perf_counter()
            run()
            synchronize(device)
            seconds = torch.tensor([time.perf_counter() - began])
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            found[name].append(float(seconds))
    return {name: median(times[WARM_UP:]) for name, times in found.items()}


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1:])
