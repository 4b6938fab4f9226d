"""A partial checkpoint of any layout resumes in any other, and each rank reads its own parts alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.launching import Mpirun
from tests.library.conftest import TORCH

_DEGREE = "sharded_data_parallel_degree"
RANKS = Path(__file__).parent / "ranks/checkpoint_layouts.py"
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {"partitions": 1}),
    "replicas": (4, {"partitions": 2, "ddp": True, "shard_optimizer_state": True}),
    "shares": (4, {"partitions": 2, "ddp": True, "tensor_parallel_degree": 2}),
    "shards": (4, {"partitions": 1, "ddp": True, "sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 0}),
    "both": (
        4,
        {
            "partitions": 1,
            "ddp": True,
            "tensor_parallel_degree": 2,
            "sharded_data_parallel_degree": 2,
            "sdp_gradient_clipping": 0,
        },
    ),
}
"""Ranks and mp_parameters, by name."""


def layouts() -> dict[str, tuple[int, dict[str, Any]]]:
    """torch before 2.6 has no FSDP2."""
    return {
        name: layout
        for name, layout in LAYOUTS.items()
        if "sharded_data_parallel_degree" not in layout[1] or TORCH >= (2, 6)
    }


@pytest.mark.long
@pytest.mark.mpi
def test_any_layout_resumes_in_any_other(mpirun: Mpirun, tmp_path: Path) -> None:
    for case in ("saves", "resumes"):
        for name, (ranks, parameters) in layouts().items():
            others = [other for other in layouts() if other != name] if case == "resumes" else []
            output = mpirun(ranks, RANKS, case, tmp_path, name, *others, SM_HP_MP_PARAMETERS=json.dumps(parameters))
            assert output.count(case) == ranks, output
