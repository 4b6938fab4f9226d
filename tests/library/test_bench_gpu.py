"""benchmarks/gpu.py, as far as it goes without a GPU: so that it still runs when somebody has one."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from tests.library.conftest import Mpirun, Python, clean_environment

SCRIPT = str(Path(__file__).parents[2] / "benchmarks" / "gpu.py")
RANKS = Path(SCRIPT).with_name("gpu_ranks.py")
ON_DEVICE = Path(__file__).parent / "ranks/on_device.py"


def bench(python: Python, *words: str) -> subprocess.CompletedProcess[str]:
    command = [*python(), SCRIPT, *words]
    env = {**clean_environment(), "PYTHON_EXEC": command[0]}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_it_needs(python: Python) -> None:
    ended = bench(python)
    assert ended.returncode == 2
    assert ended.stderr.startswith("bench-gpu needs one NVIDIA GPU and a torch with CUDA and NCCL: torch ")
    assert "RESULT" not in ended.stdout


@pytest.mark.long
def test_all_but_the_device_runs_on_the_cpu(python: Python) -> None:
    ended = bench(python, "--device", "cpu", "--rounds", "2", "--bytes", "100000")
    assert ended.returncode == 0, ended.stderr
    names = [line.split()[1] for line in ended.stdout.splitlines() if line.startswith("RESULT ")]
    assert names == [
        "name=cpu-suites",
        "name=cpu-nccl-all-reduce-1rank",
        "name=cpu-nccl-short-all-reduce-1rank",
        "name=cpu-nccl-ddp-1rank",
        "name=cpu-nccl-compiled-ddp-1rank",
        "name=cpu-nccl-fsdp2-1rank",
        "name=cpu-timeline-1rank",
        "name=cpu-staging-all-reduce-2ranks",
        "name=cpu-amp-step",
        "name=cpu-amp-bytes",
        "name=cpu-ddp-exposed",
        "name=cpu-pipeline-2stages",
    ]
    assert "its figures mean nothing" in ended.stdout


@pytest.mark.once
@pytest.mark.mpi
def test_its_ranks_keep_their_tensors_on_the_device(mpirun: Mpirun, tmp_path: Path) -> None:
    """In a rehearsal, which refuses what mixes devices."""
    rehearsed = {"SHOAL_REHEARSE": "1", "SHOAL_REHEARSE_GPUS": "2"}
    assert "groups" in mpirun(2, ON_DEVICE, "cuda", **rehearsed)
    for ranks, case in ((1, "own"), (2, "stages")):
        mpirun(ranks, RANKS, case, tmp_path, 1, 100_000, "cuda", **rehearsed)
        assert (tmp_path / f"{case}-{ranks}.json").exists()
