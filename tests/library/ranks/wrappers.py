"""One rank: what torch puts around a model, on the backend `smddp`, trains as one process does on the ranks' batches.

That process is computed on every rank: it adds up the gradients of all ranks' shares, in the order of the ranks.
Arguments: the names of checks, or of one of the lists at the end. SMDDP_TEST_DEVICE=cuda trains on CUDA devices.

Not here, as torch refuses them on a CPU: SyncBatchNorm ("expected input tensor to be on cuda or …") and
bf16_compress_hook ("required CUDA 11+ and NCCL 2.10+ …").
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401 (registers the backend)

STEPS, SAMPLES, FEATURES, CLASSES = 6, 12, 10, 3
DEVICE = torch.device(os.environ.get("SMDDP_TEST_DEVICE") or "cpu")
EXACT = 1e-6 if DEVICE.type == "cpu" else 1e-5

dist.init_process_group(backend="smddp")
RANK, SIZE = dist.get_rank(), dist.get_world_size()
Loss = Callable[[torch.nn.Module, int, int], torch.Tensor]
"""Of a model, in a step, on a rank's share."""


class Net(torch.nn.Module):
    """Two layers, and two branches of which a forward takes one: inputs (n, 10) to scores (n, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(FEATURES, 16)
        self.outer = torch.nn.Linear(16, CLASSES)
        self.branches = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(2))

    def forward(self, inputs: torch.Tensor, branch: int | None = None) -> torch.Tensor:
        hidden = torch.tanh(self.inner(inputs))
        taken = self.branches if branch is None else [self.branches[branch]]
        for layer in taken:
            hidden = torch.tanh(layer(hidden))
        return self.outer(hidden)  # type: ignore[no-any-return]


def new_model(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().to(DEVICE)


def share(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
    return inputs.to(DEVICE), torch.randint(0, CLASSES, (SAMPLES,), generator=generator).to(DEVICE)


def loss_of(model: torch.nn.Module, step: int, rank: int, **options: Any) -> torch.Tensor:
    inputs, labels = share(step, rank)
    return torch.nn.functional.cross_entropy(model(inputs, **options), labels)


def branching(model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
    """A branch that the ranks do not share in every other step, and one that nobody takes in the others."""
    return loss_of(model, step, rank, branch=(step + rank * (step % 2)) % 2)


def sgd(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


def train(
    model: torch.nn.Module,
    loss: Loss = loss_of,
    ranks: Iterable[int] = (RANK,),
    steps: int = STEPS,
    optimizer: torch.optim.Optimizer | None = None,
) -> list[float]:
    """The mean loss of the ranks' shares in each step."""
    optimizer = optimizer or sgd(model.parameters())
    shares = list(ranks)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        found = torch.zeros((), device=DEVICE)
        for rank in shares:
            part = loss(model, step, rank) / len(shares)
            part.backward()  # type: ignore[no-untyped-call]
            found += part.detach()
        optimizer.step()
        losses.append(float(found))
    return losses


def check(model: torch.nn.Module, losses: list[float], loss: Loss = loss_of, tolerance: float = EXACT) -> None:
    """Against one process."""
    one_process = new_model()
    mean = torch.tensor(losses, device=DEVICE)
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    expected = train(one_process, loss, range(SIZE))
    torch.testing.assert_close(mean.cpu(), torch.tensor(expected), rtol=0, atol=tolerance)
    same(parameters_of(model), one_process.parameters(), tolerance)


def same(found: Iterable[torch.Tensor], expected: Iterable[torch.Tensor], tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.detach(), other.detach(), rtol=0, atol=tolerance)


def parameters_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """The whole parameters, of a sharded model too."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            return [parameter.detach().clone() for parameter in model.parameters()]
    return [getattr(parameter, "full_tensor", lambda p=parameter: p)() for parameter in model.parameters()]


def wrapped(**options: Any) -> DistributedDataParallel:
    """Other first weights on every rank: wrapping makes them equal."""
    return DistributedDataParallel(new_model(seed=RANK), **options)


def ddp() -> None:
    for options in (
        {},
        {"bucket_cap_mb": 0.0005},  # several buckets, in flight together
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"static_graph": True, "gradient_as_bucket_view": True},
    ):
        model = wrapped(**options)
        check(model, train(model))


def compiled() -> None:
    """By Dynamo alone: what it makes of a graph later has nothing to do with the ranks."""
    if not hasattr(dist, "_coalescing_manager"):  # torch 2.0 does not compile on Python 3.11
        return
    network = new_model(seed=RANK)
    network.register_buffer("broadcast", torch.zeros(3, device=DEVICE))  # in each forward, which is compiled
    model = DistributedDataParallel(network)
    fast: Any = torch.compile(model, backend="eager")
    check(model, train(model, lambda _, step, rank: loss_of(fast, step, rank)))


def sparse_gradients() -> None:
    """Of an embedding whose rows each rank uses others of."""

    def loss(model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        bags = torch.randint(0, 40, (SAMPLES, 3), generator=generator).to(DEVICE)
        return torch.nn.functional.cross_entropy(model(bags), torch.arange(SAMPLES, device=DEVICE) % CLASSES)

    def new() -> torch.nn.Module:
        torch.manual_seed(3)
        return torch.nn.Sequential(torch.nn.EmbeddingBag(40, 8, sparse=True), torch.nn.Linear(8, CLASSES)).to(DEVICE)

    model, one_process = DistributedDataParallel(new()), new()
    plain = [torch.optim.SGD(each.parameters(), lr=0.3) for each in (model, one_process)]
    if DEVICE.type == "cuda" and os.environ.get("SMDDP_ENGINE") == "nccl":  # torch's own has none either
        try:
            train(model, loss, optimizer=plain[0])
        except RuntimeError as error:
            assert "dense" in str(error), error
            return
    train(model, loss, optimizer=plain[0])
    assert model.module[0].weight.grad.is_sparse
    train(one_process, loss, range(SIZE), optimizer=plain[1])
    same(parameters_of(model), one_process.parameters(), EXACT)


def unused_parameters() -> None:
    for options in ({}, {"gradient_as_bucket_view": True}):
        model = wrapped(find_unused_parameters=True, **options)
        check(model, train(model, branching), branching)


def no_sync() -> None:
    """A share in pieces of which the last alone starts a collective."""
    model = wrapped()
    pieces = 3

    def in_pieces(model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
        inputs, labels = share(step, rank)
        total = torch.zeros((), device=DEVICE)
        for number, (some, theirs) in enumerate(zip(inputs.chunk(pieces), labels.chunk(pieces)), 1):
            last = number == pieces
            with contextlib.nullcontext() if last else model.no_sync():  # type: ignore[operator]
                part = torch.nn.functional.cross_entropy(model(some), theirs) / pieces
                if last:
                    return total + part
                part.backward()  # type: ignore[no-untyped-call]
                total += part.detach()
        raise AssertionError

    check(model, train(model, in_pieces))


def hooks() -> None:
    for hook, tolerance in ((default_hooks.allreduce_hook, EXACT), (default_hooks.fp16_compress_hook, 5e-3)):
        model = wrapped()
        model.register_comm_hook(None, hook)
        check(model, train(model), tolerance=tolerance)


def power_sgd() -> None:
    """Of full rank, after steps of all-reduce: as the gradients are, but for rounding."""
    model = wrapped()
    state = PowerSGDState(None, matrix_approximation_rank=16, start_powerSGD_iter=2, min_compression_rate=0)
    model.register_comm_hook(state, powerSGD_hook)
    check(model, train(model), tolerance=1e-2)


def large_batch_optimizers() -> None:
    """LAMB and LARS see equal gradients on all ranks, so they need to know nothing of these."""
    from pytorch_optimizer import LARS, Lamb

    for make in (LARS, Lamb):
        model, one_process = wrapped(), new_model()
        train(model, optimizer=make(model.parameters(), lr=0.05))
        train(one_process, ranks=range(SIZE), optimizer=make(one_process.parameters(), lr=0.05))
        same(parameters_of(model), one_process.parameters(), 1e-5)


def uneven_inputs() -> None:
    """Rank r has r steps less; a rank that has none left takes part with zeros."""

    def until_the_end(model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
        return loss_of(model, step, rank) * (step < STEPS - rank)

    model = wrapped()
    with model.join():
        train(model, steps=STEPS - RANK)
    one_process = new_model()
    train(one_process, until_the_end, range(SIZE))
    same(parameters_of(model), one_process.parameters(), EXACT)


def zero_redundancy() -> None:
    model = wrapped()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.3, momentum=0.9)
    check(model, train(model, optimizer=optimizer))


def zero_redundancy_with_uneven_inputs() -> None:
    """torch's Join of two: a rank that ended goes on updating its part."""
    model = wrapped(gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.3)
    with Join([model, optimizer]):
        train(model, steps=STEPS - RANK, optimizer=optimizer)
    same(parameters_of(model), _broadcast(parameters_of(model)), 0)


def _broadcast(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    for tensor in tensors:
        copy = tensor.detach().clone()
        dist.broadcast(copy, src=0)
        yield copy


def fsdp() -> None:
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
        model = _fsdp(sharding_strategy=strategy)
        check(model, train(model))


def hybrid() -> None:
    """Not with shards on one rank each: torch does not average those over their replicas, on gloo neither."""
    for mesh in meshes({1, SIZE // 2} - {0, SIZE}):
        model = _fsdp(sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)
        check(model, train(model))


def meshes(numbers: Iterable[int]) -> Iterator[Any]:
    """Of so many replicas, sharded over the ranks of each."""
    for replicas in sorted(numbers):
        yield _mesh(replicas, SIZE // replicas)


def _mesh(*sizes: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh  # torch 2.0 has none

    return init_device_mesh(DEVICE.type, sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])


def _fsdp(**options: Any) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(
        new_model(),
        device_id=DEVICE if DEVICE.type == "cpu" else torch.cuda.current_device(),
        use_orig_params=True,
        auto_wrap_policy=lambda module, recurse, **_: recurse or isinstance(module, torch.nn.Linear),
        **options,
    )


def fully_sharded() -> None:
    """The second version of FSDP; with a mesh of two dimensions, hybrid."""
    from torch.distributed.fsdp import fully_shard  # torch 2.0 has none

    for mesh in (_mesh(SIZE), *meshes({1, SIZE // 2, SIZE} - {0})):
        model = new_model()
        for layer in model.modules():
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        check(model, train(model))


def fsdp_in_bfloat16() -> None:
    low = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    model = _fsdp(mixed_precision=low)
    check(model, train(model), tolerance=5e-2)


def distributed_tensors() -> None:
    """All-gather, all-to-all, all-reduce and reduce-scatter, by torch's functional collectives."""
    from torch.distributed.tensor import Shard, distribute_tensor  # torch 2.0 has none

    whole = torch.arange(12.0 * SIZE, device=DEVICE).view(2 * SIZE, 6) / 7
    rows: Any = distribute_tensor(whole, _mesh(SIZE), [Shard(0)])
    columns = rows.redistribute(placements=[Shard(1)])
    for found in (rows, columns):
        assert torch.equal(found.full_tensor(), whole)
    product = rows.t() @ rows
    for found in (product, product.redistribute(placements=[Shard(0)])):
        torch.testing.assert_close(found.full_tensor(), whole.t() @ whole)


def asynchronous_checkpoints() -> None:
    """Saved beside training, by collectives of a thread of torch's own, in a group of its own; loaded as it was."""
    from torch.distributed import checkpoint as checkpoints  # other names in torch 2.0
    from torch.distributed.fsdp import fully_shard

    directory = [tempfile.mkdtemp() if RANK == 0 else None]
    dist.broadcast_object_list(directory)
    sharded: list[Any] = [fully_shard(new_model(seed), mesh=_mesh(SIZE)) for seed in (0, 1)]
    model, other = sharded
    checkpoint: Any = checkpoints
    beside = dist.new_group(backend="smddp")
    saving = checkpoint.async_save(model.state_dict(), checkpoint_id=directory[0], process_group=beside)
    train(model)
    saving.result()
    found = other.state_dict()
    checkpoint.load(found, checkpoint_id=directory[0])
    same((value.full_tensor() for value in found.values()), new_model().state_dict().values(), 0)
    dist.barrier()
    if RANK == 0:
        shutil.rmtree(str(directory[0]))


Check = Callable[[], None]
replicas: tuple[Check, ...] = (
    *(ddp, unused_parameters, no_sync, hooks, power_sgd, uneven_inputs),
    *(zero_redundancy, zero_redundancy_with_uneven_inputs, compiled, sparse_gradients),
)
shards: tuple[Check, ...] = (
    *(fsdp, hybrid, fully_sharded, fsdp_in_bfloat16),
    *(distributed_tensors, asynchronous_checkpoints),
)
for name in sys.argv[1:]:
    found = globals()[name]
    for each in found if isinstance(found, tuple) else (found,):
        try:
            each()
        except Exception as error:
            raise AssertionError(f"{each.__name__} on rank {RANK}") from error
        if RANK == 0:
            print(f"as one process: {each.__name__}", flush=True)
dist.destroy_process_group()
