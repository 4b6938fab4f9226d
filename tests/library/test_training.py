"""What torch offers to train with, on the backend `smddp`: the checks are those of ranks/wrappers.py, on real ranks."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.library.conftest import TORCH, shards_on_the_cpu
from tests.repeats import in_soak

if TYPE_CHECKING:
    from tests.library.conftest import Mpirun

RANKS = Path(__file__).parent / "ranks"
WRAPPERS = RANKS / "wrappers.py"
CHECKS = {"collectives": 5, "meshes": 4, "models": 10}


@pytest.mark.mpi
def test_every_wrapper_of_replicas_trains_as_one_process(mpirun: Mpirun) -> None:
    names = (
        "ddp unused_parameters no_sync hooks power_sgd uneven_inputs zero_redundancy zero_redundancy_with_uneven_inputs"
    )
    compared = re.findall(r"as one process: (\w+)", mpirun(2, WRAPPERS, "replicas"))
    assert compared == [*names.split(), "compiled", "sparse_gradients"]


@pytest.mark.mpi
@pytest.mark.skipif(find_spec("pytorch_optimizer") is None, reason="only a checkout has it, and not an image")
def test_optimizers_for_large_batches_train_as_one_process(mpirun: Mpirun) -> None:
    assert "large_batch_optimizers" in mpirun(2, WRAPPERS, "large_batch_optimizers")


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("ranks", "hosts"), [(2, "two hosts"), pytest.param(4, "two ranks each", marks=pytest.mark.long)]
)
def test_compressed_gradients_train(mpirun: Mpirun, ranks: int, hosts: str) -> None:
    """Between two hosts; on one, int8 has nothing to compress."""
    by_rank = f'SMDDP_HOST=$((OMPI_COMM_WORLD_RANK / {ranks // 2})) exec "$0" "$@"'
    command = ["-c", f'import os, sys; os.execvp("sh", ["sh", "-c", {by_rank!r}, sys.executable, *sys.argv[1:]])']
    trained = re.findall(r"trains with (\w+)", mpirun(ranks, *command, WRAPPERS.with_name("compressed.py")))
    assert trained == ["fp16", "bf16", "int8", "low_rank", "top_k"]


@pytest.mark.mpi
@shards_on_the_cpu
def test_every_wrapper_of_shards_trains_as_one_process(mpirun: Mpirun) -> None:
    compared = re.findall(r"as one process: (\w+)", mpirun(2, WRAPPERS, "shards"))
    names = "fsdp hybrid fully_sharded fsdp_in_bfloat16 distributed_tensors asynchronous_checkpoints"
    assert compared == names.split()


@pytest.mark.mpi
@shards_on_the_cpu
def test_replicas_of_shards(mpirun: Mpirun) -> None:
    """Needs two ranks for each of the two."""
    mpirun(4, WRAPPERS, "hybrid", "fully_sharded")


@pytest.mark.mpi
@pytest.mark.skipif(TORCH < (2, 13), reason="needs what torch 2.13 has of device meshes")
@pytest.mark.parametrize(
    ("ranks", "lists", "compiler"),
    [
        (2, "collectives models", "aot_eager"),
        (4, "collectives meshes", "aot_eager"),
        in_soak(4, "models", "aot_eager"),
        in_soak(2, "collectives models", "inductor"),
    ],
)
def test_meshes_shards_and_tensor_parallelism(mpirun: Mpirun, ranks: int, lists: str, compiler: str) -> None:
    output = mpirun(ranks, RANKS / "meshes.py", *lists.split(), SMDDP_TEST_COMPILER=compiler)
    assert len(re.findall(r"^equal: ", output, re.MULTILINE)) == sum(CHECKS[name] for name in lists.split())


@pytest.mark.mpi
@pytest.mark.skipif(TORCH < (2, 13), reason="needs what torch 2.13 has of device meshes")
def test_sharded_models_resume_with_another_number_of_ranks(mpirun: Mpirun, tmp_path: Path) -> None:
    """All kinds of shards, at each step, have the losses of one process, to which they shrink in the end."""
    losses: dict[str, list[float]] = {}
    for ranks, begin, end in ((2, 0, 2), (4, 2, 4), (2, 4, 6), (1, 6, 8)):
        output = mpirun(ranks, RANKS / "sharded_checkpoints.py", tmp_path, begin, end)
        for kind, found in {match[1]: match[2] for match in re.finditer(r"losses of (\w+): \[(.*)\]", output)}.items():
            losses[kind] = [*losses.get(kind, []), *map(float, found.split(", "))]
    assert len(losses) == 7
    expected = losses.pop("one_process")
    for kind, found in losses.items():
        assert found == pytest.approx(expected, rel=1e-5), kind
