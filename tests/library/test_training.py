"""What torch offers to train with, on the backend `smddp`: the checks are those of ranks/wrappers.py, on real ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.library.conftest import shards_on_the_cpu

if TYPE_CHECKING:
    from tests.library.conftest import Mpirun

WRAPPERS = Path(__file__).parent / "ranks" / "wrappers.py"


@pytest.mark.mpi
def test_every_wrapper_of_replicas_trains_as_one_process(mpirun: Mpirun) -> None:
    names = (
        "ddp unused_parameters no_sync hooks power_sgd uneven_inputs zero_redundancy zero_redundancy_with_uneven_inputs"
    )
    compared = re.findall(r"as one process: (\w+)", mpirun(2, WRAPPERS, "replicas"))
    assert compared == [*names.split(), "compiled", "sparse_gradients"]


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
