"""DistributedDataParallel: the ranks end with equal weights, those of one process trained on all of their batches."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:
    from tests.library.conftest import Mpirun

TRAINING = Path(__file__).parent / "ranks" / "training.py"


@pytest.mark.mpi
@pytest.mark.parametrize(("world_size", "microbatches"), [(2, 2), pytest.param(3, 1, marks=pytest.mark.once)])
def test_ranks_train_as_one_process(mpirun: Mpirun, tmp_path: Path, world_size: int, microbatches: int) -> None:
    mpirun(world_size, TRAINING, tmp_path, microbatches)
    expected, untrained = np.load(tmp_path / "expected.npz"), np.load(tmp_path / "untrained.npz")
    ranks = [np.load(tmp_path / f"{rank}.npz") for rank in range(world_size)]
    for name in expected:
        assert not np.allclose(expected[name], untrained[name], atol=1e-3), "nothing was learnt"
        np.testing.assert_allclose(ranks[0][name], expected[name], rtol=0, atol=1e-12)
        assert all(np.array_equal(ranks[0][name], rank[name]) for rank in ranks), "not bitwise equal"
