"""Sharded data parallelism on real ranks: see ranks/modelparallel_sharded.py."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.library.conftest import TORCH

if TYPE_CHECKING:
    from tests.library.conftest import Mpirun

RANKS = Path(__file__).parent / "ranks/modelparallel_sharded.py"
NEEDS_FSDP2 = pytest.mark.skipif(TORCH < (2, 6), reason="torch has FSDP2 from 2.6 on")


def job(mpirun: Mpirun, ranks: int, degree: int, cases: str, *rest: object, stages: int = 1) -> None:
    output = mpirun(ranks, RANKS, cases, *rest, DEGREE=str(degree), STAGES=str(stages))
    for case in cases.split(","):
        assert output.count(case) == ranks, output


@NEEDS_FSDP2
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("ranks", "degree"),
    [(2, 2), pytest.param(4, 2, marks=pytest.mark.once), pytest.param(4, 4, marks=pytest.mark.once)],
)
def test_sharded_training_equals_that_of_one_process(mpirun: Mpirun, ranks: int, degree: int) -> None:
    job(mpirun, ranks, degree, "equal")


@NEEDS_FSDP2
@pytest.mark.long
@pytest.mark.mpi
def test_what_scripts_do_beside_sharding_changes_no_result(mpirun: Mpirun) -> None:
    job(mpirun, 2, 2, "kinds,checkpointed,habits,outside,half,names,foreign")


@NEEDS_FSDP2
@pytest.mark.mpi
@pytest.mark.once
def test_parts_of_a_model_constructed_late_do_not_depend_on_their_number(mpirun: Mpirun) -> None:
    output = [mpirun(ranks, RANKS, "delayed", DEGREE=str(ranks)) for ranks in (1, 2)]
    assert len({line for text in output for line in text.splitlines() if line.startswith("values")}) == 1


@NEEDS_FSDP2
@pytest.mark.long
@pytest.mark.mpi
@pytest.mark.once
def test_full_checkpoints_resume_with_and_without_shards(mpirun: Mpirun, tmp_path: Path) -> None:
    job(mpirun, 2, 2, "saved", tmp_path)
    for layout in ((1, 1, 1), (2, 1, 2)):
        job(mpirun, *layout[:2], "resumed", tmp_path, stages=layout[2])
