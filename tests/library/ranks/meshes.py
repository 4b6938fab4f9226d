"""One rank: functional collectives, device meshes and what torch builds on them, on the backend `smddp`.

Each check compares with gloo on the same ranks, with one process, or with the numbers that a collective must give.
Arguments: names of LISTS, at the end. Four ranks add meshes of two dimensions. SMDDP_TEST_COMPILER names the compiler,
without which Dynamo and AOTAutograd compile: what Inductor adds to them takes a minute.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed import checkpoint as checkpoints
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401 (registers the backend)

COMPILER = os.environ.get("SMDDP_TEST_COMPILER") or "aot_eager"
WIDTH, WORDS, STEPS, SENTENCES, LENGTH = 12, 13, 4, 8, 8
dist.init_process_group(backend="smddp")
RANK, SIZE = dist.get_rank(), dist.get_world_size()
EVERYBODY = range(SIZE)
torch.set_num_threads(1)


def given(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(rank + 7))
    return numbers.to(dtype)


def stacked(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.stack([given(rank, *shape, dtype=dtype) for rank in EVERYBODY])


def close(found: Any, expected: Any, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, check_dtype=False)


def functional_collectives() -> None:
    groups: tuple[Any, ...] = (dist.group.WORLD, list(EVERYBODY), mesh_of(SIZE))
    for group, dtype in itertools.product(groups, DTYPES):
        mine, all_of = given(RANK, 2 * SIZE, 6, dtype=dtype), stacked(2 * SIZE, 6, dtype=dtype).float()
        low = 1e-6 if dtype == torch.float32 else 2e-2
        for dimension in (0, 1):
            found = functional.all_gather_tensor(mine, dimension, group)
            assert torch.equal(found, torch.cat(list(all_of.to(dtype)), dimension))
        for op, reduce in REDUCTIONS.items():
            close(functional.all_reduce(mine, op, group).float(), reduce(all_of), low)
            found = functional.reduce_scatter_tensor(mine, op, 0, group)
            close(found.float(), reduce(all_of).chunk(SIZE)[RANK], low)
        both = functional.all_gather_into_tensor_coalesced([mine, mine[:1]], group)
        assert torch.equal(both[0], all_of.to(dtype).flatten(0, 1)) and torch.equal(both[1], all_of[:, 0].to(dtype))
        for found in functional.reduce_scatter_tensor_coalesced([mine, mine], "sum", [0, 0], group):
            close(found.float(), all_of.sum(0).chunk(SIZE)[RANK], low)
        for found in functional.all_reduce_coalesced([mine, mine], "avg", group):
            close(found.float(), all_of.mean(0), low)
        assert torch.equal(functional.broadcast(mine, SIZE - 1, group), all_of[-1].to(dtype))
        turned = functional.permute_tensor(mine.flatten(), [(rank + 1) % SIZE for rank in EVERYBODY], group)
        assert torch.equal(turned, all_of[RANK - 1].to(dtype).flatten())


def uneven_parts() -> None:
    """Rank r sends r + 1 rows to each; the last rank none to the first."""
    sizes = [[(sender + 1) * (sender < SIZE - 1 or receiver > 0) for receiver in EVERYBODY] for sender in EVERYBODY]
    mine = given(RANK, sum(sizes[RANK]), 3)
    into = [sizes[sender][RANK] for sender in EVERYBODY]
    world: Any = dist.group.WORLD
    found = functional.all_to_all_single(mine, into, sizes[RANK], world)
    parts = [given(rank, sum(sizes[rank]), 3).split(sizes[rank])[RANK] for rank in EVERYBODY]  # type: ignore[no-untyped-call]
    assert torch.equal(found, torch.cat(parts))
    gathered = [torch.empty(rank, 3) for rank in EVERYBODY]  # rank 0 has none
    dist.all_gather(gathered, given(RANK, RANK, 3))
    for rank in EVERYBODY:
        assert torch.equal(gathered[rank], given(rank, rank, 3))
    shares = [given(RANK, 4, 3)[: rank + 1] for rank in EVERYBODY]
    dist.reduce_scatter(reduced := torch.empty(RANK + 1, 3), shares, dist.ReduceOp.AVG)
    close(reduced, stacked(4, 3).mean(0)[: RANK + 1])


def premultiplied_sums() -> None:
    for factor in (0.25, torch.tensor([0.25])):
        op = dist._make_nccl_premul_sum(factor)  # type: ignore[attr-defined]
        whole, expected = given(RANK, SIZE, 5), stacked(SIZE, 5).sum(0) / 4
        dist.reduce_scatter_tensor(part := torch.empty(1, 5), whole, op)
        close(part, expected[RANK : RANK + 1])
        dist.all_reduce(whole, op)
        close(whole, expected)


def coalesced() -> None:
    """Several collectives in one: torch's manager asks the group for them at its end."""
    for is_async in (False, True):
        whole, parts = [torch.empty(SIZE, 4) for _ in range(3)], [torch.empty(1, 4) for _ in range(3)]
        reduced = [given(RANK, 5) for _ in range(3)]
        with dist._coalescing_manager(async_ops=is_async) as gathering:  # type: ignore[attr-defined]
            for at, one in enumerate(whole):
                dist.all_gather_into_tensor(one, given(RANK, 1, 4) * at)
        with dist._coalescing_manager(async_ops=is_async) as scattering:  # type: ignore[attr-defined]
            for at, one in enumerate(parts):
                dist.reduce_scatter_tensor(one, given(RANK, SIZE, 4) * at)
        with dist._coalescing_manager(async_ops=is_async) as reducing:  # type: ignore[attr-defined]
            for one in reduced:
                dist.all_reduce(one)
        for manager in (gathering, scattering, reducing) if is_async else ():
            manager.wait()
        for at in range(3):
            close(whole[at], stacked(4).view(SIZE, 4) * at)
            close(parts[at], stacked(SIZE, 4).sum(0)[RANK : RANK + 1] * at)
            close(reduced[at], stacked(5).sum(0))


def compiled_collectives() -> None:
    """In one graph, as torch's compiler has them."""

    def step(mine: torch.Tensor, group: Any) -> torch.Tensor:
        whole = functional.all_gather_tensor(mine * 2, 0, group)
        total = functional.all_reduce(whole.sin(), "sum", group)
        return functional.reduce_scatter_tensor(total + 1, "avg", 0, group) * 3  # type: ignore[no-any-return]

    fast = torch.compile(step, fullgraph=True, backend=COMPILER)
    mine = given(RANK, 2 * SIZE, 5)
    close(fast(mine, dist.group.WORLD), step(mine, dist.group.WORLD))


def mesh_of(*sizes: int, backend: str | None = None) -> DeviceMesh:
    names = ("outer", "inner")[-len(sizes) :]
    if backend is None:
        return init_device_mesh("cpu", sizes, mesh_dim_names=names)
    return init_device_mesh("cpu", sizes, mesh_dim_names=names, backend_override=dict.fromkeys(names, backend))


def shapes() -> Iterator[tuple[int, ...]]:
    yield (SIZE,)
    if SIZE == 4:
        yield (2, 2)


def meshes_of_groups() -> None:
    for shape in shapes():
        for backend in (None, "smddp", "cpu:smddp", "gloo"):
            mesh = mesh_of(*shape, backend=backend)
            for name in mesh.mesh_dim_names or ():
                group = mesh.get_group(name)
                ranks = dist.get_process_group_ranks(group)
                dist.all_reduce(total := torch.full((5,), RANK + 1.0), group=group)
                assert total.tolist() == [sum(ranks) + len(ranks)] * 5
                assert (dist.get_backend(group) == "gloo") == (backend == "gloo"), dist.get_backend(group)
            whole = given(0, 8, 8)
            for placements in itertools.product((Shard(0), Shard(1), Replicate()), repeat=len(shape)):
                tensor = distribute_tensor(whole, mesh, [Replicate()] * len(shape))
                close(tensor.redistribute(placements=placements).full_tensor(), whole)
    if SIZE == 4:
        flat: Any = mesh_of(2, 2)._flatten("both")
        assert flat.size() == 4
        dist.all_reduce(total := torch.ones(3), group=flat.get_group())
        assert total.tolist() == [4.0] * 3


def subgroups() -> None:
    """By every function of torch that makes one."""
    group: Any = dist.new_group(list(EVERYBODY), backend="cpu:smddp")
    dist.all_reduce(total := torch.ones(3), group=group)
    assert total.tolist() == [SIZE] * 3
    mine, groups = dist.new_subgroups(2)  # type: ignore[no-untyped-call]
    dist.all_reduce(total := torch.ones(3), group=mine)
    assert total.tolist() == [2.0] * 3 and len(groups) == SIZE // 2
    mine, _ = dist.new_subgroups_by_enumeration([[rank] for rank in EVERYBODY])  # type: ignore[no-untyped-call]
    dist.all_reduce(total := torch.ones(3), group=mine)
    assert total.tolist() == [1.0] * 3


def sharded_unevenly() -> None:
    mesh = mesh_of(SIZE)
    for shape in ((SIZE + 1, 3), (1, 3), (2 * SIZE - 1, 5)):
        whole = given(0, *shape)
        tensor = distribute_tensor(whole, mesh, [Shard(0)])
        assert torch.equal(tensor.full_tensor(), whole)
        close(tensor.redistribute(placements=[Shard(1)]).full_tensor(), whole)
        close((tensor * 2).sum(0).full_tensor(), 2 * whole.sum(0))  # type: ignore[attr-defined]


class Block(nn.Module):
    """Attention-free block of a transformer: (sentences, length, WIDTH) to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.narrow(torch.tanh(self.wide(self.norm(inputs))))  # type: ignore[no-any-return]


class Net(nn.Module):
    """Words (sentences, length) to scores (sentences, length, WORDS); 13 words are no multiple of the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.words(words)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))  # type: ignore[no-any-return]


def net(device: str = "cpu") -> Any:
    torch.manual_seed(1)
    with torch.device(device):
        return Net()


def words(step: int) -> torch.Tensor:
    """A step's sentences for all replicas, and the next word of each."""
    return torch.randint(0, WORDS, (SENTENCES, LENGTH + 1), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, sentences: torch.Tensor) -> torch.Tensor:
    scores = model(sentences[:, :-1])
    return nn.functional.cross_entropy(scores.flatten(0, 1).float(), sentences[:, 1:].flatten())


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-2)


def train(
    model: nn.Module, replica: int = 0, replicas: int = 1, optimizer: Any = None, steps: range = range(STEPS)
) -> list[float]:
    """The mean loss over replicas of each step."""
    optimizer, losses = optimizer or adam(model), []
    for step in steps:
        loss = loss_of(model, words(step).chunk(replicas)[replica])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        if replicas > 1:
            dist.all_reduce(total, dist.ReduceOp.AVG)
        losses.append(float(total))
    return losses


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return states.get_model_state_dict(model, options=states.StateDictOptions(full_state_dict=True))  # type: ignore[return-value]


def as_one_process(model: nn.Module, losses: list[float], tolerance: float = 2e-5) -> None:
    alone = net()
    close(torch.tensor(losses), torch.tensor(train(alone)), tolerance)
    for name, found in whole(model).items():
        close(found.full_tensor() if isinstance(found, DTensor) else found, alone.state_dict()[name], 10 * tolerance)


def shard(model: Any, mesh: DeviceMesh, **options: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def fsdp2_in_each_way() -> None:
    mesh = mesh_of(SIZE)
    for options in ({"reshard_after_forward": True}, {"reshard_after_forward": False}, {"reshard_after_forward": SIZE}):
        model = shard(net(), mesh, **options)
        as_one_process(model, train(model, RANK, SIZE))
    model = shard(net(), mesh)
    for block, following in itertools.pairwise(model.blocks):
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])
    as_one_process(model, train(model, RANK, SIZE))
    model = shard(net(), mesh, shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 else None)
    as_one_process(model, train(model, RANK, SIZE))
    model = shard(net(), mesh)
    for part in (model, *model.blocks):
        part.set_gradient_divide_factor(SIZE)
        part.set_force_sum_reduction_for_comms(True)
    as_one_process(model, train(model, RANK, SIZE))


def from_the_meta_device() -> None:
    model = shard(net("meta"), mesh_of(SIZE))
    model.to_empty(device="cpu")
    options = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    states.set_model_state_dict(model, net().state_dict() if RANK == 0 else {}, options=options)
    as_one_process(model, train(model, RANK, SIZE))


def accumulated_and_clipped() -> None:
    """Gradients are reduced in the last of two halves only, and clipped by their norm over all ranks."""
    model, alone = shard(net(), mesh_of(SIZE)), net()
    for step, each in itertools.product(range(STEPS), (model, alone)):
        optimizer = torch.optim.SGD(each.parameters(), 0.5)
        mine = words(step).chunk(SIZE)[RANK] if each is model else words(step)
        for number, half in enumerate((mine, mine.flip(1))):
            if each is model:
                model.set_requires_gradient_sync(number == 1)
            (loss_of(each, half) / 2).backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(each.parameters(), 0.3)
        if each is model:
            found = norm.full_tensor() if isinstance(norm, DTensor) else norm
        else:
            close(found, norm, 1e-5)
        optimizer.step()
    for name, found in whole(model).items():
        close(found, alone.state_dict()[name], 1e-4)


def as_on_gloo(wrap: Callable[[Any, DeviceMesh], Any], tolerance: float = 1e-6) -> None:
    """Losses and parameters, of a run on `smddp` and one on gloo."""
    runs = []
    for backend in ("smddp", "gloo"):
        torch._dynamo.reset()
        model = wrap(net(), mesh_of(SIZE, backend=backend))
        runs.append((train(model, RANK, SIZE), list(whole(model).values())))
    close(torch.tensor(runs[0][0]), torch.tensor(runs[1][0]), tolerance)
    for found, expected in zip(runs[0][1], runs[1][1], strict=True):
        close(found, expected, tolerance)


def in_bfloat16() -> None:
    for reduced in (torch.float32, torch.bfloat16):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced)
        as_on_gloo(lambda model, mesh, policy=policy: shard(model, mesh, mp_policy=policy), 1e-2)  # type: ignore[misc]

    def under_autocast(model: Any, mesh: DeviceMesh) -> Any:
        model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
        return shard(model, mesh)

    as_on_gloo(under_autocast, 1e-2)


def compiled() -> None:
    def layer_by_layer(model: Any, mesh: DeviceMesh) -> Any:
        for block in model.blocks:
            block.compile(backend=COMPILER)
        return shard(model, mesh)

    as_on_gloo(layer_by_layer)
    as_on_gloo(lambda model, mesh: torch.compile(shard(model, mesh), backend=COMPILER))


def recomputed() -> None:
    def wrap(model: Any, mesh: DeviceMesh) -> Any:
        apply_activation_checkpointing(model, check_fn=lambda part: isinstance(part, Block))
        return shard(model, mesh)

    as_on_gloo(wrap)


def fsdp1() -> None:
    def wrap(model: Any, mesh: DeviceMesh) -> Any:
        return FullyShardedDataParallel(
            model,
            mesh.get_group(),
            device_id=torch.device("cpu"),
            use_orig_params=True,
            auto_wrap_policy=lambda module, recurse, **_: recurse or isinstance(module, Block),
        )

    as_on_gloo(wrap)


def tensor_parallel(model: Any, mesh: DeviceMesh, sequence: bool = False) -> Any:
    """Each block's wide layer by columns, its narrow one by rows; with `sequence`, norms on shards of the length."""
    plan: dict[str, Any] = {"head": ColwiseParallel(output_layouts=Replicate())}
    if sequence:
        plan = {
            "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
    parallelize_module(model, mesh, plan)
    for block in model.blocks:
        layers: dict[str, Any] = {"wide": ColwiseParallel(), "narrow": RowwiseParallel()}
        if sequence:
            layers = {
                "norm": SequenceParallel(),
                "wide": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
                "narrow": RowwiseParallel(output_layouts=Shard(1)),
            }
            parallelize_module(block, mesh, {"wide": layers.pop("wide")})
            layers["wide"] = ColwiseParallel()
        parallelize_module(block, mesh, layers)
    return model


def tensor_parallelism() -> None:
    mesh = mesh_of(SIZE)
    for sequence in (False, True):
        model = tensor_parallel(net(), mesh, sequence)
        as_one_process(model, train(model))
    model = tensor_parallel(net(), mesh)
    for block in model.blocks:
        block.compile(backend=COMPILER)
    as_one_process(model, train(model))


def parallel_losses() -> None:
    model = net()
    head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh_of(SIZE), {"head": head})
    scores: Any = model(words(0)[:, :-1])
    with loss_parallel():
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), words(0)[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
    expected = loss_of(net(), words(0))
    close(loss.full_tensor(), expected)  # type: ignore[attr-defined]


def sharded_and_parallel() -> None:
    """Two dimensions: replicas of shards, and shards of layers that several ranks compute together."""
    if SIZE < 4:
        return
    mesh = mesh_of(2, 2)
    model = shard(net(), mesh)
    as_one_process(model, train(model, RANK, SIZE))
    for reshard in (True, False):
        model = shard(tensor_parallel(net(), mesh["inner"]), mesh["outer"], reshard_after_forward=reshard)
        losses = train(model, RANK // 2, 2)
        as_one_process(model, losses)


def distributed_checkpoints() -> None:
    """Saved, loaded into others, and trained on as if nothing had happened; into another kind of model too."""
    names: list[Any] = [tempfile.mkdtemp() if RANK == 0 else None]
    dist.broadcast_object_list(names)
    mesh = mesh_of(SIZE)
    makes: tuple[Callable[[], Any], ...] = (
        lambda: shard(net(), mesh),
        lambda: tensor_parallel(net(), mesh),
        lambda: torch.compile(shard(net(), mesh), backend="eager"),
    )
    checkpoint: Any = checkpoints
    group = dist.new_group(backend="smddp")
    for number, (make, other) in enumerate(zip(makes, (*makes[1:], makes[0]), strict=True)):
        path = f"{names[0]}/{number}"
        model = make()
        optimizer = adam(model)
        train(model, optimizer=optimizer, steps=range(2))
        if number % 2:
            checkpoint.save(both(model, optimizer), checkpoint_id=path)
        else:
            checkpoint.async_save(both(model, optimizer), checkpoint_id=path, process_group=group).result()
        dist.barrier()
        expected = train(model, optimizer=optimizer, steps=range(2, 4))
        for made in (make(), other()):
            optimizer = adam(made)
            found = both(made, optimizer)
            checkpoint.load(found, checkpoint_id=path)
            states.set_state_dict(made, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
            close(torch.tensor(train(made, optimizer=optimizer, steps=range(2, 4))), torch.tensor(expected), 1e-5)
    dist.barrier()
    if RANK == 0:
        shutil.rmtree(names[0])


def both(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    model_state, optimizer_state = states.get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


DTYPES = (torch.float32, torch.bfloat16)
REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda all_of: all_of.sum(0),
    "avg": lambda all_of: all_of.mean(0),
    "max": lambda all_of: all_of.amax(0),
}
LISTS: dict[str, tuple[Callable[[], None], ...]] = {
    "collectives": (functional_collectives, uneven_parts, premultiplied_sums, coalesced, compiled_collectives),
    "meshes": (meshes_of_groups, subgroups, sharded_unevenly, sharded_and_parallel),
    "models": (
        *(fsdp2_in_each_way, from_the_meta_device, accumulated_and_clipped, in_bfloat16, compiled, recomputed, fsdp1),
        *(tensor_parallelism, parallel_losses, distributed_checkpoints),
    ),
}
for name in sys.argv[1:]:
    for check in LISTS[name]:
        try:
            check()
        except Exception as error:
            raise AssertionError(f"{check.__name__} on rank {RANK}") from error
        if RANK == 0:
            print(f"equal: {check.__name__}", flush=True)
dist.destroy_process_group()
