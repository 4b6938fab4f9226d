"""Tensors from device to device between stages, by gloo in place of NCCL: see ranks/transferring.py."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.launching import TwoRanks
from tests.library.conftest import Mpirun
from tests.library.nccl_stand_in import NEWEST, OLDEST, record, takes
from tests.repeats import SEED, times
from torch._C._distributed_c10d import HashStore

from smdistributed.modelparallel.backend.exceptions import SMPConfigError
from smdistributed.modelparallel.torch.pipeline import carrier
from smdistributed.modelparallel.torch.pipeline.carrier import VARIABLE, Carrier, open_carrier, read_choice

RANKS = Path(__file__).parent / "ranks"
REHEARSE = {"SHOAL_REHEARSE": "1", "SHOAL_REHEARSE_GPUS": "4"}


def transferred(said: str) -> int:
    return sum(map(int, re.findall(r"transferred (\d+) tensors", said)))


@pytest.mark.mpi
@pytest.mark.soak
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.once)])
def test_all_stages_send_to_all_others_at_once(mpirun: Mpirun, ranks: int) -> None:
    words = ("traffic", SEED, times(40, 400))
    said = mpirun(ranks, RANKS / "transferring.py", "transfers.py", *words, STAGES=str(ranks))
    assert len(re.findall(r"all \d+ messages", said)) == ranks
    assert transferred(said) > 0


@pytest.mark.long
@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.once)])
def test_a_pipeline_computes_the_same_bits_as_through_the_host(mpirun: Mpirun, ranks: int) -> None:
    script = (RANKS / "transfers.py", "pipeline", "cpu")
    through_host = mpirun(ranks, *script, STAGES=str(ranks))
    between_devices = mpirun(ranks, RANKS / "transferring.py", *script, STAGES=str(ranks))
    assert transferred(between_devices) > 0
    digests = [sorted(re.findall(r"digest .*", said)) for said in (through_host, between_devices)]
    assert len(digests[0]) == ranks
    assert digests[0] == digests[1]


@pytest.mark.mpi
@pytest.mark.once
def test_jobs_of_the_suite_run_so_too(mpirun: Mpirun) -> None:
    said = mpirun(3, RANKS / "transferring.py", "modelparallel.py", "random_models", SEED, times(4, 20), STAGES="3")
    assert said.count("random") == 3
    assert transferred(said) > 0


@pytest.mark.mpi
def test_what_only_a_gpu_runs_is_rehearsed(mpirun: Mpirun) -> None:
    """A rehearsal has streams, events and devices, and CUDA tensors."""
    script = (RANKS / "transfers.py", "pipeline", "cuda")
    said = mpirun(2, RANKS / "transferring.py", "--device", *script, STAGES="2", **REHEARSE)
    assert transferred(said) > 0
    through_host = mpirun(2, *script, STAGES="2", **REHEARSE)
    assert sorted(re.findall(r"digest .*", said)) == sorted(re.findall(r"digest .*", through_host))


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("dies", r"rank 0 has ended: .*rank 1\): connection lost"),
        ("hangs", r"(?s)rank 0 has ended: .*(received nothing|device)"),
    ],
)
def test_a_stage_that_is_gone_in_the_middle_of_a_transfer_ends_the_step(
    two_ranks: TwoRanks, free_port: int, how: str, says: str
) -> None:
    words = (RANKS / "transferring.py", "transfers.py", "dies", how)
    with two_ranks(free_port, *words, STAGES="2", SMP_TIMEOUT_SECONDS="3") as ranks:
        said = ended(ranks[0])
    assert re.search(says, said), said


def ended(process: subprocess.Popen[str]) -> str:
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said
    return said


def test_the_setting() -> None:
    assert read_choice({}) == "host"
    assert read_choice({VARIABLE: "auto"}) == "auto"
    with pytest.raises(SMPConfigError, match=r"SMP_STAGE_TRANSFERS is 'tcp': it must be one of 'host', 'auto', 'nccl'"):
        read_choice({VARIABLE: "tcp"})


def test_nccl_problem_tensors_go_through_the_host(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One line says why; where NCCL is demanded, that is an error."""
    said: list[str] = []
    for choice, replicas, problem in (("host", 1, ""), ("auto", 1, "rank 1 sees no device"), ("auto", 2, "")):
        monkeypatch.setenv(VARIABLE, choice)
        monkeypatch.setattr(carrier, "nccl_problem", lambda *_, problem=problem: problem)
        assert open_carrier(HashStore(), 0, 2, replicas, 9) is None
        said.append(capfd.readouterr().err)
    assert said[0] == ""
    assert said[1] == "smp: large tensors go from stage to stage through the host's memory: rank 1 sees no device.\n"
    assert "the job has several replicas of the model" in said[2]
    monkeypatch.setenv(VARIABLE, "nccl")
    monkeypatch.setattr(carrier, "nccl_problem", lambda *_: "rank 1 sees no device")
    with pytest.raises(SMPConfigError, match="NCCL cannot carry tensors between stages: rank 1 sees no device"):
        open_carrier(HashStore(), 0, 2, 1, 9)


def test_only_long_plain_tensors_are_taken() -> None:
    found = Carrier(None, torch.device("cpu"), 100)
    assert found.takes(torch.zeros(25))
    for tensor in (torch.zeros(24), torch.zeros(5, 5).to_sparse(), torch.zeros(25, device="meta")):
        assert not found.takes(tensor)
    assert not Carrier(None, torch.device("cpu"), 0).takes(torch.zeros(0))


def test_copies_are_what_a_tensor_shows() -> None:
    given = torch.tensor([1 + 2j, 3 - 4j])
    for tensor in (given.conj(), given.conj().imag, given.real, torch.arange(6).reshape(2, 3).t(), torch.tensor(True)):
        (copy,) = Carrier(None, torch.device("cpu")).copy([tensor])
        assert copy.is_contiguous()
        assert not copy.is_conj()
        assert not copy.is_neg()
        assert torch.equal(copy, tensor)
        assert copy.data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_what_is_called_of_nccl_exists(version: str) -> None:
    classes = record(version)
    group: Any = classes["ProcessGroupNCCL"]
    assert [any(takes(signature, 3) for signature in group[name]) for name in ("send", "recv")] == [True, True]
    assert any(takes(signature, 4) for signature in group["__init__"])
    assert "_timeout" in classes["ProcessGroupNCCL.Options"]
    assert any(takes(signature, 0) for signature in classes["Work"]["wait"])
    assert ("abort" in group) == (version == NEWEST)
