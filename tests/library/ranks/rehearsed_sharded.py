"""Two ranks: sharded models and tensor subclasses are on the emulated GPUs and train as the plain model does."""

# mypy: disable-error-code="no-untyped-call,attr-defined,arg-type,override,call-overload,misc"
from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

rank, size = (int(os.environ[f"OMPI_COMM_WORLD_{name}"]) for name in ("RANK", "SIZE"))
dist.init_process_group("nccl", rank=rank, world_size=size)
RANK = dist.get_rank()
torch.cuda.set_device(RANK)
HERE = torch.device("cuda", RANK)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8, elementwise_affine=False), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))  # type: ignore[no-any-return]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return Block().cuda()


def train(model: nn.Module, *, parts: int) -> list[float]:
    """Returns the mean losses of three steps; with `parts` 2, each rank has its half of the batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(3):
        batch = torch.randn(4, 6, 8, generator=generator).cuda()
        x = batch.chunk(2)[RANK] if parts == 2 else batch
        output = model(x)
        assert output.device == HERE, output.device
        loss = output.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        losses.append(mean.item())
    return losses


def fsdp(**options: Any) -> Callable[[], list[float]]:
    def run() -> list[float]:
        model = make_model()
        mesh = {"mesh": init_device_mesh("cuda", (2,))} if options.get("mesh") else {}
        fully_shard(model, **mesh, **{name: value for name, value in options.items() if name != "mesh"})
        check_places(model)
        losses = train(model, parts=2)
        check_checkpoint(model)
        return losses

    return run


def check_places(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor) and parameter.device == HERE and parameter.is_cuda, name
        assert parameter.to_local().device == HERE and parameter.full_tensor().device == HERE, name
    assert f"device='{HERE}'" in repr(next(model.parameters()).to_local())


def check_checkpoint(model: nn.Module) -> None:
    shared = [tempfile.mkdtemp() if RANK == 0 else None]
    dist.broadcast_object_list(shared)
    before = {name: copy.deepcopy(value.full_tensor()) for name, value in model.state_dict().items()}
    dcp.save(model.state_dict(), checkpoint_id=shared[0])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = model.state_dict()
    dcp.load(state, checkpoint_id=shared[0])
    model.load_state_dict(state)
    for name, value in model.state_dict().items():
        assert torch.equal(value.full_tensor(), before[name]), name
        assert value.device == HERE


def tensor_parallel() -> list[float]:
    mesh = init_device_mesh("cuda", (2,))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return train(parallelize_module(make_model(), mesh, plan), parts=1)


def sequence_parallel() -> list[float]:
    mesh = init_device_mesh("cuda", (2,))
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(0)),
    }
    model = parallelize_module(make_model(), mesh, plan)
    model.register_forward_hook(lambda _, __, output: DTensor.from_local(output, mesh, [Shard(0)]).full_tensor())
    return train(model, parts=1)


def two_dimensions() -> list[float]:
    """FSDP2 over tensor parallelism, on a mesh of one rank by two."""
    mesh = init_device_mesh("cuda", (1, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(make_model(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return train(fully_shard(model, mesh=mesh["dp"]), parts=1)


def attention() -> None:
    """By head, as torch does on CUDA, with gradients."""
    mesh = init_device_mesh("cuda", (2,))
    plain = [torch.randn(2, 4, 6, 8, generator=torch.Generator().manual_seed(n)).cuda() for n in range(3)]
    split = [distribute_tensor(each, mesh, [Shard(1)]).requires_grad_() for each in plain]
    for each in plain:
        each.requires_grad_()
    results = [nn.functional.scaled_dot_product_attention(*qkv, is_causal=True) for qkv in (plain, split)]
    for result in results:
        result.square().sum().backward()
    assert results[1].placements == (Shard(1),) and results[1].device == HERE
    torch.testing.assert_close(results[1].full_tensor(), results[0])
    assert split[0].grad is not None and split[0].grad.device == HERE
    torch.testing.assert_close(split[0].grad.full_tensor(), plain[0].grad)


def random_numbers() -> None:
    mesh = init_device_mesh("cuda", (2,))
    generator = torch.Generator().manual_seed(3)
    drawn = torch.distributed.tensor.rand(4, 2, device_mesh=mesh, placements=[Replicate()])
    assert drawn.device == HERE
    filled = distribute_tensor(torch.zeros(4), mesh, [Replicate()])
    nn.init.normal_(filled, generator=generator)
    expected = torch.zeros(4).normal_(generator=torch.Generator().manual_seed(3))
    assert torch.equal(filled.to_local().cpu(), expected)


class Scaled(torch.Tensor):
    """A wrapper subclass as in quantization libraries: bytes and a scale."""

    @staticmethod
    def __new__(cls, raw: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, raw.shape, dtype=torch.float32, device=raw.device)

    def __init__(self, raw: torch.Tensor, scale: torch.Tensor) -> None:
        self.raw, self.scale = raw, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["raw", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.clone.default, torch.ops.aten.detach.default, torch.ops.aten._to_copy.default):
            return cls(func(args[0].raw), func(args[0].scale))
        plain = [each.raw.float() * each.scale if isinstance(each, Scaled) else each for each in args]
        return func(*plain, **(kwargs or {}))


def wrappers() -> None:
    scaled = Scaled(torch.ones(4, 8, dtype=torch.int8), torch.tensor(2.0))
    assert not scaled.is_cuda
    moved = scaled.to("cuda")
    assert moved.device == moved.raw.device == HERE and not scaled.is_cuda
    assert Scaled(moved.raw, moved.scale).device == HERE
    weight = nn.Parameter(moved, requires_grad=False)
    output = nn.functional.linear(torch.ones(2, 8, device="cuda"), weight)
    assert output.device == HERE and output.tolist() == [[16.0] * 4] * 2


def nested() -> None:
    parts = [torch.ones(2, 8), torch.ones(3, 8)]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged, device="cuda")
    assert jagged.device == HERE and jagged.values().device == HERE
    output = nn.Linear(8, 4).cuda()(jagged)
    assert output.device == HERE and [each.device for each in output.unbind()] == [HERE, HERE]
    on_cpu = torch.nested.nested_tensor(parts, layout=torch.jagged)
    assert on_cpu.device.type == "cpu" and on_cpu.cuda().device == HERE


CASES: dict[str, Callable[[], list[float]]] = {
    "FSDP2, default mesh": fsdp(),
    "FSDP2, a mesh": fsdp(mesh=True),
    "FSDP2, bfloat16": fsdp(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)),
    "tensor parallel": tensor_parallel,
    "sequence parallel": sequence_parallel,
    "FSDP2 over tensor parallel": two_dimensions,
}
expected = train(make_model(), parts=1)
for name, case in CASES.items():
    losses = case()
    tolerance = 2e-2 if "bfloat16" in name else 1e-5
    torch.testing.assert_close(losses, expected, rtol=tolerance, atol=0, msg=f"{name}: {losses}, not {expected}")
for check in (attention, random_numbers, wrappers, nested):
    check()
print(f"sharded {RANK}")
