"""Rehearsals: CUDA scripts on a machine without GPUs, by the launchers that users have."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.library.conftest import TORCH, clean_environment

import shoal_rehearsal
from shoal_rehearsal.settings import RehearsalError, RehearsalSettings, read_settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.library.conftest import Alone, Mpirun

RANKS = Path(__file__).parent / "ranks"
PACKAGES = Path(shoal_rehearsal.__file__).parents[1]
SCRIPT = RANKS / "rehearsed.py"
NOTICE = "SHOAL REHEARSAL: this is not a training run"
needs_dtensor = pytest.mark.skipif(TORCH < (2, 6), reason="torch 2.6 has the public names of DTensor and FSDP2")
REHEARSE = {"SHOAL_REHEARSE": "1"}


@pytest.fixture
def start_up(tmp_path: Path) -> dict[str, str]:
    """Variables with which each Python process reads the .pth file at its start, as where the wheel is installed."""
    site = tmp_path / "site"
    site.mkdir()
    shutil.copy(PACKAGES / "shoal-rehearsal.pth", site)
    (site / "sitecustomize.py").write_text(f"import site; site.addsitedir({str(site)!r})")
    return {"PYTHONPATH": os.pathsep.join([str(site), str(PACKAGES)])}


def python(*arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {**clean_environment(), **environ}
    return subprocess.run([sys.executable, *map(str, arguments)], env=env, capture_output=True, text=True, timeout=100)


def torchrun(*arguments: object) -> Sequence[object]:
    return ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *arguments)


def read_ranks(directory: Path, world_size: int) -> list[dict[str, Any]]:
    return [json.loads((directory / f"rank-{rank}.json").read_text()) for rank in range(world_size)]


def check_training(directory: Path, world_size: int) -> list[list[float]]:
    ranks = read_ranks(directory, world_size)
    for rank, facts in enumerate(ranks):
        assert facts["is_cuda"] and facts["device"] == f"cuda:{rank}"
        assert facts["devices"] == world_size
        assert facts["milliseconds"] > 0
        assert all(loss == pytest.approx(2.5, abs=1) for loss in facts["losses"])  # finite, too
    return [rank["losses"] for rank in ranks]


@pytest.mark.long
@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.once), 2])
def test_a_cuda_script_trains_as_the_same_script_for_cpus(
    start_up: dict[str, str], alone: Alone, mpirun: Mpirun, free_port: int, tmp_path: Path, world_size: int
) -> None:
    """The latter without a rehearsal, in processes that start warm."""
    launcher = torchrun if world_size > 1 else lambda *arguments: arguments
    for name in ("cpu", "cuda"):
        (tmp_path / name).mkdir()
    rehearsed = python(*launcher(SCRIPT, "--out", tmp_path / "cuda"), **start_up, **REHEARSE)
    assert rehearsed.returncode == 0, rehearsed.stderr
    assert rehearsed.stderr.count(NOTICE) == 1
    assert f"Emulated GPUs per host: {world_size} " in rehearsed.stderr
    if world_size == 1:
        alone(SCRIPT, "--cpu", "--out", tmp_path / "cpu")
    else:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port)}
        mpirun(2, SCRIPT, "--cpu", "--out", tmp_path / "cpu", **where)
    on_cpu = read_ranks(tmp_path / "cpu", world_size)
    assert check_training(tmp_path / "cuda", world_size) == [rank["losses"] for rank in on_cpu]
    assert [rank["mean_score"] for rank in read_ranks(tmp_path / "cuda", world_size)] == pytest.approx(
        [rank["mean_score"] for rank in on_cpu]
    )


@pytest.mark.mpi
def test_mixed_precision_under_mpirun(mpirun: Mpirun, tmp_path: Path, free_port: int) -> None:
    """On smddp; on nccl, the test above."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port)}
    mpirun(2, SCRIPT, "--amp", "--backend", "smddp", "--out", tmp_path, **REHEARSE, **where)
    check_training(tmp_path, 2)


@pytest.mark.mpi
@pytest.mark.parametrize("name", ["collectives", pytest.param("sharded", marks=needs_dtensor)])
def test_tables_of_cases_on_two_ranks(mpirun: Mpirun, free_port: int, name: str) -> None:
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port)}
    output = mpirun(2, RANKS / f"rehearsed_{name}.py", **REHEARSE, **where)
    assert f"{name} 0" in output and f"{name} 1" in output


def test_what_a_script_sees(start_up: dict[str, str]) -> None:
    ran = python(RANKS / "rehearsed_answers.py", SHOAL_REHEARSE_GPUS="2", **start_up, **REHEARSE)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert len(ran.stdout.split()) == 18
    assert ran.stderr.count(NOTICE) == 1


@pytest.mark.once
def test_without_the_variable_nothing_is_loaded(start_up: dict[str, str]) -> None:
    off = python("-c", "import torch; print(torch.cuda.Stream.__module__)", SHOAL_REHEARSE="false", **start_up)
    assert off.stdout.startswith("torch.cuda"), off.stdout + off.stderr
    assert NOTICE not in off.stderr
    unset = python("-c", "import sys; print([n for n in sys.modules if 'rehearsal' in n], sys.meta_path)", **start_up)
    assert unset.stdout.startswith("[] ") and "rehearsal" not in unset.stdout, unset.stdout + unset.stderr


@pytest.mark.once
@pytest.mark.parametrize(("code", "reported"), [("torch.cuda.device_count()", 1), ("torch.zeros(1).cuda()", 0)])
def test_a_rank_that_uses_no_gpu_says_so(start_up: dict[str, str], code: str, reported: int) -> None:
    """Many examples exit with 0 if a host has too few."""
    ran = python("-c", f"import torch; {code}", RANK="0", **start_up, **REHEARSE)
    assert ran.returncode == 0
    assert ran.stderr.count("counted the GPUs of this host and used none") == reported, ran.stderr


@pytest.mark.once
def test_triton_and_compilers_are_not_emulated(start_up: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "triton.py").touch()
    path = os.pathsep.join([start_up["PYTHONPATH"], str(tmp_path)])
    code = (
        "import torch, importlib.util as i; assert torch.compile(max) is max; print(i.find_spec('triton'));"
        "import triton.language"
    )
    ran = python("-c", code, **{**start_up, **REHEARSE, "PYTHONPATH": path})
    assert (ran.returncode, ran.stdout) == (1, "None\n"), ran.stderr
    assert "SHOAL REHEARSAL: torch.compile compiles nothing" in ran.stderr
    assert "SHOAL REHEARSAL: Triton kernels are not emulated" in ran.stderr and "Fix: " in ran.stderr


@pytest.mark.once
def test_it_can_be_activated_after_torch_was_imported(alone: Alone) -> None:
    """As tests/warm.py does it."""
    assert alone("-c", "import torch; print(torch.zeros(1).cuda().device)", **REHEARSE) == "cuda:0\n"


@pytest.mark.once
def test_what_cannot_be_is_refused_by_the_import_of_torch(start_up: dict[str, str]) -> None:
    ran = python("-c", "import torch; print('imported')", SHOAL_REHEARSE="maybe", **start_up)
    assert ran.returncode == 1
    assert "SHOAL_REHEARSE='maybe' in the environment. Allowed: 1, true, yes, on" in ran.stderr
    assert "imported" not in ran.stdout


@pytest.mark.once
@pytest.mark.parametrize("value", ["0", "129", "two", "-1"])
def test_a_number_of_gpus_that_cannot_be(value: str) -> None:
    with pytest.raises(RehearsalError, match=f"SHOAL_REHEARSE_GPUS='{value}' in the environment: it must be a whole"):
        read_settings({"SHOAL_REHEARSE_GPUS": value})


@pytest.mark.once
def test_as_many_gpus_as_ranks_on_the_host() -> None:
    ranks = {"RANK": "1", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert read_settings({}) == RehearsalSettings(gpus=1, prints_notice=True, launched=False)
    assert read_settings(ranks) == RehearsalSettings(gpus=4, prints_notice=False, launched=True)
    assert read_settings({**ranks, "SHOAL_REHEARSE_GPUS": "2"}).gpus == 2
    assert read_settings({"LOCAL_RANK": "0"}).gpus == 1, "what makes no sense is for the process group to refuse"


@pytest.mark.mpi
@pytest.mark.skipif(TORCH < (2, 1), reason="checkpoints of torch before 2.1 keep their inputs")
@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.once)])
def test_inputs_of_checkpoints_leave_the_gpu(mpirun: Mpirun, stages: int) -> None:
    output = mpirun(stages, RANKS / "modelparallel_offloaded.py", STAGES=str(stages), **REHEARSE)
    assert output.count("horizon 4: ") == stages


@pytest.mark.mpi
def test_a_model_on_two_stages(mpirun: Mpirun, tmp_path: Path) -> None:
    """Every stage's threads, which torch gives device 0, are on that of the rank."""
    output = mpirun(2, RANKS / "modelparallel_rehearsed.py", tmp_path, **REHEARSE)
    assert "rehearsed 0" in output and "rehearsed 1" in output
