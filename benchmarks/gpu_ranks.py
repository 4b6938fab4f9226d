"""One rank of benchmarks/gpu.py. `gpu_ranks.py CASE DIRECTORY ROUNDS BYTES DEVICE`; the cases are at the end."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import gpu_gpt
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from smdistributed.core import timeline
from smdistributed.core.torch.devices import HostStaging

WARM_UP = 2
RECORDED_STEPS = 5
LAYERS = 8
SHORT_BYTES = 1 << 10
_Runs = dict[str, Callable[[], object]]
_Times = dict[str, dict[str, float]]


class Case:
    """The parameters of a rank, and how it measures."""

    def __init__(self, words: Sequence[str]) -> None:
        self.directory, self.rounds, self.size = Path(words[0]), int(words[1]), int(words[2])
        self.device = torch.device(words[3])

    def measure(self, runs: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        """Return the median seconds of each; they take turns, and a round counts for its slowest rank."""
        found: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(WARM_UP + self.rounds):
            for name, run in runs.items():
                self.synchronize()
                dist.barrier()
                began = time.perf_counter()
                run()
                self.synchronize()
                seconds = torch.tensor([time.perf_counter() - began])
                dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
                found[name].append(float(seconds))
        return {name: median(times[WARM_UP:]) for name, times in found.items()}

    def record(self, run: Callable[[], object], name: str) -> None:
        """Record a few steps into a directory of that name."""
        dist.barrier()
        path = self.directory / name
        timeline.start(path, dist.get_rank(), 2, default_name="smdataparallel_timeline.json", append_rank=True)
        for _ in range(RECORDED_STEPS):
            run()
        self.synchronize()
        timeline.stop()

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def model(self) -> torch.nn.Sequential:
        """Return an MLP with about `size` bytes of gradients in float32."""
        layers = [torch.nn.Linear(self.width, self.width, device=self.device) for _ in range(LAYERS)]
        return torch.nn.Sequential(*layers)

    @property
    def width(self) -> int:
        """The features of each layer."""
        return max(16, int((self.size / 4 / LAYERS) ** 0.5))

    @property
    def batch(self) -> torch.Tensor:
        """A rank's share of the inputs."""
        return torch.randn(64, self.width, device=self.device)


def own_device(case: Case) -> _Times:
    """Ranks with a device each: the backend against the group of torch that carries its tensors."""
    times = {"all-reduce": case.measure(all_reduces(case, case.size))}
    times["short-all-reduce"] = case.measure(all_reduces(case, SHORT_BYTES))
    for name, way in gpu_gpt.WAYS.items():
        steps = {backend: gpt_step(case, way, group) for backend, group in groups(case).items()}
        losses: dict[str, list[torch.Tensor]] = {backend: [] for backend in steps}
        if all(steps.values()):
            times[name] = case.measure({backend: keep(step, losses[backend]) for backend, step in steps.items()})
            compare(name, losses["smddp"], losses["torch"])
    times["timeline"] = timeline_costs(case)
    return times


def gpt_step(case: Case, way: Any, group: Any) -> Any:
    """A step of the GPT in this rank's share, in one of the ways. None: this torch does not have it."""
    size = gpu_gpt.Size.of_bytes(case.size)
    return way(size, gpu_gpt.batch_of(size, dist.get_rank(), case.device), group)


def keep(step: gpu_gpt.Step, losses: list[torch.Tensor]) -> Callable[[], object]:
    """A step that adds its loss to the list."""
    return lambda: losses.append(step())


def compare(name: str, ours: Sequence[torch.Tensor], others: Sequence[torch.Tensor], tolerance: float = 1e-3) -> None:
    """End with an error unless the losses agree, relatively, and fall; print the first and last on rank 0."""
    one, other = (torch.stack(list(losses)).float().cpu() for losses in (ours, others))
    furthest = ((one - other).abs() / other).max().item()
    if dist.get_rank() == 0:
        print(f"losses of {name}: {one[0]:.6f} to {one[-1]:.6f}, furthest from the other's by {furthest:.1e} of it")
    if not furthest <= tolerance or not one[-1] < one[0]:
        raise SystemExit(f"The losses of {name} differ from the other's: {one.tolist()}, {other.tolist()}.")


def groups(case: Case) -> dict[str, Any]:
    """The backend's group, and one of torch's own for the device, of all ranks."""
    return {
        "smddp": dist.group.WORLD,
        "torch": dist.new_group(backend="nccl" if case.device.type == "cuda" else "gloo"),
    }


def all_reduces(case: Case, size: int) -> _Runs:
    """all_reduce of one tensor of `size` bytes, by both groups."""
    tensor = torch.zeros(size // 4, device=case.device)

    def of(group: Any) -> Callable[[], object]:
        return lambda: dist.all_reduce(tensor, group=group)

    return {name: of(group) for name, group in groups(case).items()}


def ddp_step(case: Case, group: Any, compress: bool = False) -> Callable[[], object]:
    """A step under autocast, with gradients in several buckets."""
    bucket_mb = max(case.size / LAYERS / (1 << 20), 0.001)
    model = DistributedDataParallel(case.model(), process_group=group, bucket_cap_mb=bucket_mb)
    if compress:
        model.register_comm_hook(None, fp16_compress_hook)
    return step_of(case, model)


def step_of(case: Case, model: Any) -> Callable[[], object]:
    """Forward and backward under autocast."""
    batch = case.batch
    low = torch.float16 if case.device.type == "cuda" else torch.bfloat16

    def run() -> None:
        with torch.autocast(case.device.type, dtype=low):
            loss = model(batch).float().square().mean()
        loss.backward()
        model.zero_grad(set_to_none=False)

    return run


def timeline_costs(case: Case) -> dict[str, float]:
    """A step while a timeline is recorded, and before. Last: NCCL goes on telling of collectives afterwards."""
    run = ddp_step(case, dist.group.WORLD)
    before = case.measure({"off": run})
    timeline.start(case.directory / "costs", dist.get_rank(), dist.get_world_size(), append_rank=True)
    recorded = case.measure({"on": run})
    timeline.stop()
    return {**before, **recorded}


def shared_device(case: Case) -> _Times:
    """Ranks that share a device: their tensors are copied to the host, reduced there, and copied back."""
    steps = {name: ddp_step(case, dist.group.WORLD, name == "fp16") for name in ("fp16", "fp32")}
    train_together(case)
    times = {"staging": case.measure(staging(case)), "amp": case.measure(steps)}
    for name, run in steps.items():
        case.record(run, name)
    return times


def train_together(case: Case) -> None:
    """The GPT by DDP and FSDP2 on these ranks, against one process with the sentences of all: the losses agree."""
    size = gpu_gpt.Size.of_bytes(case.size)
    both = torch.cat([gpu_gpt.batch_of(size, rank, case.device) for rank in range(dist.get_world_size())])
    model = gpu_gpt.new_model(size, case.device)
    alone = gpu_gpt.step_of(model, model.parameters(), both)
    expected = [alone() for _ in range(case.rounds)]
    for name in ("ddp", "fsdp2"):
        step = gpt_step(case, gpu_gpt.WAYS[name], dist.group.WORLD)
        if step:
            losses = torch.stack([step() for _ in range(case.rounds)])
            dist.all_reduce(losses, op=dist.ReduceOp.AVG)
            # One process computes under autocast. FSDP2 has all weights and activations in bfloat16.
            compare(f"{name} on ranks that share a device", list(losses), expected, 1e-3 if name == "ddp" else 2e-2)


def staging(case: Case) -> _Runs:
    """A staged all_reduce, and its copies alone."""
    tensor = torch.zeros(case.size // 4, device=case.device)
    host = torch.empty(case.size // 4, pin_memory=case.device.type == "cuda")
    staged, options = carrier(case), dist.AllreduceOptions()

    def copies() -> None:
        host.copy_(tensor)
        tensor.copy_(host)

    return {"smddp": lambda: staged.allreduce([tensor], options), "copies": copies}


def carrier(case: Case) -> Any:
    """Return the group that carries tensors of ranks which share a device."""
    group: Any = dist.group.WORLD
    if case.device.type != "cuda":
        return HostStaging(group)
    found = group._cuda() if hasattr(group, "_cuda") else None
    if not isinstance(found, HostStaging):
        raise SystemExit("The ranks do not share a device: they would be measured with NCCL.")
    return found


def stages(case: Case) -> _Times:
    """Two stages of a pipeline on one device, against one process. The losses must agree."""
    import smdistributed.modelparallel.torch as smp

    smp.init({"partitions": 2, "microbatches": 4})
    torch.manual_seed(0)
    alone, parted = case.model(), case.model()
    parted.load_state_dict(alone.state_dict())
    model, batch = smp.DistributedModel(parted), case.batch
    losses: dict[str, float] = {}

    @smp.step
    def pipelined(model: Any, batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch).square().mean()
        model.backward(loss)
        return loss  # type: ignore[no-any-return]

    def in_stages() -> None:
        losses["stages"] = pipelined(model, batch).reduce_mean().item()
        model.zero_grad()

    def in_one() -> None:
        if dist.get_rank() == 0:
            parts = [alone(part).square().mean() for part in batch.chunk(4)]
            losses["one"] = sum(part.item() for part in parts) / 4
            for part in parts:
                part.backward()
            alone.zero_grad()

    times = {"pipeline": case.measure({"stages": in_stages, "one-process": in_one})}
    if dist.get_rank() == 0 and abs(losses["stages"] - losses["one"]) > 1e-4 * abs(losses["one"]):
        raise SystemExit(f"The stages do not compute what one process does: {losses}.")
    return times


CASES: dict[str, Callable[[Case], _Times]] = {
    "own": own_device,
    "shared": shared_device,
    "stages": stages,
}


def main(words: Sequence[str]) -> None:
    """Measure a case, and write it down."""
    case = Case(words[1:])
    is_pipeline = words[0] == "stages"
    if not is_pipeline:  # smp.init does it, and refuses a process that has imported this
        import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401 (registers the backend)

        dist.init_process_group(backend="smddp")
    torch.manual_seed(0)
    times = CASES[words[0]](case)
    if dist.get_rank() == 0:
        (case.directory / f"{words[0]}-{dist.get_world_size()}.json").write_text(json.dumps(times))
    dist.barrier()
    if not is_pipeline:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
