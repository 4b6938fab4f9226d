"""transformers' own Trainer on model parallel ranks, by its hooks for this library: see ranks/trainer.py."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

# Not by an import, which takes each worker 0.7 s.
pytestmark = pytest.mark.skipif(not find_spec("transformers"), reason="the images do not have transformers")

if TYPE_CHECKING:
    from tests.library.conftest import Alone, Mpirun

RANKS = Path(__file__).parent / "ranks/trainer.py"
PARALLEL = {
    "SM_HP_MP_PARAMETERS": json.dumps({"partitions": 2, "microbatches": 2}),
    "SM_FRAMEWORK_PARAMS": json.dumps({"sagemaker_mpi_enabled": True}),
    "SHOAL_REHEARSE": "1",  # Trainer asks for CUDA when it is model parallel
}
TOLERANCE = 1e-5


def seen(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith('{"name"')]


@pytest.mark.long
@pytest.mark.mpi
def test_trainer_trains_evaluates_predicts_and_resumes(mpirun: Mpirun, alone: Alone, tmp_path: Path) -> None:
    """Two stages see what one process sees: losses, norms of gradients before they are clipped, and predictions."""
    expected = []
    for whole in seen(alone(RANKS, tmp_path / "alone")):
        assert len(whole["losses"]) == 6
        expected += [whole, {**whole, **{name: whole[name][3:] for name in ("losses", "norms")}}]
    found = seen(mpirun(2, RANKS, tmp_path / "stages", **PARALLEL))
    assert [run["name"] for run in found] == [run["name"] for run in expected] == ["gpt2", "gpt2", "bert", "bert"]
    for run, other in zip(found, expected):
        for name, values in other.items():
            assert run[name] == (values if name == "name" else pytest.approx(values, abs=TOLERANCE)), name
