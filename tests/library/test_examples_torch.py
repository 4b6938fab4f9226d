"""The examples that need torch only, with tiny sizes: they learn, resume, and their files are of use elsewhere."""

from __future__ import annotations

import os
import runpy
import shutil
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from tests.library.conftest import Alone, Mpirun

EXAMPLES = Path(__file__).parents[2] / "examples"
DDP, RESNET = EXAMPLES / "ddp" / "train.py", EXAMPLES / "resnet" / "train.py"
S3_INPUT = EXAMPLES / "s3-input" / "train_s3.py"


@pytest.mark.mpi
def test_ddp_resumes_alone_and_its_model_predicts_elsewhere(mpirun: Mpirun, alone: Alone, tmp_path: Path) -> None:
    log = mpirun(2, DDP, "--epochs", "3")
    assert log.count("epoch ") == 3
    assert "world size 2, backend smddp" in log
    log = alone(DDP, "--epochs", "5")
    assert [line.split()[1] for line in log.splitlines() if line.startswith("epoch ")] == ["4/5", "5/5"]
    with tarfile.open(tmp_path / "model.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "model" / "model.pt", "model.pt")
    log = alone(EXAMPLES / "inference" / "predict_torch.py", "model.tar.gz")
    assert int(log.splitlines()[-1].split()[0]) >= 90, log


@pytest.mark.once
def test_ddp_runs_unchanged_with_torchrun_and_gloo(alone: Alone, free_port: int) -> None:
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port}")
    log = alone(*torchrun, DDP, "--epochs", "3", "--backend", "gloo")
    assert "world size 2, backend gloo" in log


def test_resnet_resumes_bit_for_bit(alone: Alone, tmp_path: Path) -> None:
    small = ("--blocks", "1", "--images", "96", "--epochs", "2", "--checkpoint-dir", "kept")
    assert alone(RESNET, *small, "--model-dir", "whole").count("epoch ") == 2
    shutil.rmtree(tmp_path / "kept" / "step-00000006")
    assert alone(RESNET, *small, "--model-dir", "resumed").count("epoch ") == 1
    whole, resumed = (torch.load(tmp_path / name / "model.pt") for name in ("whole", "resumed"))
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    log = alone(RESNET, *small, "--images", "32", "--epochs", "3")
    assert "epoch 3/3 step 7 " in log, "a job can go on for longer, with other numbers of steps"


def test_resnet_refuses_batches_that_no_rank_can_fill(alone: Alone) -> None:
    with pytest.raises(AssertionError, match=r"--batch-size 32: a rank has only 31 images\. Fix: "):
        alone(RESNET, "--images", "31")


@pytest.mark.mpi
def test_both_sides_of_the_migration_train_alike(mpirun: Mpirun, tmp_path: Path) -> None:
    directory = EXAMPLES / "migrate-smdistributed"
    before, after = (
        mpirun(2, directory / f"{name}.py", "--epochs", "2", "--model-dir", name) for name in ("before", "after")
    )
    assert after == before
    weights = [torch.load(tmp_path / name / "model.pt") for name in ("before", "after")]
    assert all(torch.equal(weights[1][name], weights[0][name]) for name in weights[0])


@pytest.mark.once
@pytest.mark.mpi
def test_data_come_from_s3(mpirun: Mpirun, alone: Alone, tmp_path: Path) -> None:
    import boto3  # type: ignore[import-untyped]
    from moto.server import ThreadedMotoServer

    alone(EXAMPLES / "s3-input" / "prepare_wine.py", "wine")
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
        s3 = boto3.client("s3", "us-east-1", None, True, None, f"http://{host}:{port}", "x", "x")
        s3.create_bucket(Bucket="bucket-of-wine")
        for file in (tmp_path / "wine").iterdir():
            s3.upload_file(str(file), "bucket-of-wine", f"data/wine/{file.name}")
        variables = {**keys, "AWS_ENDPOINT_URL_S3": f"http://{host}:{port}", "AWS_CONFIG_FILE": os.devnull}
        variables["TMPDIR"] = str(tmp_path)
        # A rank has 71 samples: the last one of each epoch would be a batch of its own.
        options = ("--data", "s3://bucket-of-wine/data/wine", "--epochs", "5", "--batch-size", "10")
        log = mpirun(2, S3_INPUT, *options, **variables)
    finally:
        server.stop()
    assert float(log.split("test accuracy ")[1].split(",")[0]) > 0.8
    assert "world size 2, data from s3://bucket-of-wine/data/wine" in log


@pytest.mark.once
def test_downloads_have_a_directory_for_each_address_without_older_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    find_data = runpy.run_path(str(S3_INPUT))["find_data"]
    monkeypatch.setitem(find_data.__globals__, "download", lambda address, directory: directory.mkdir())
    monkeypatch.setattr("torch.distributed.barrier", lambda: None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name, value in {"MASTER_PORT": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    first = find_data("s3://bucket/one")
    (first / "train.csv").touch()
    assert find_data("s3://bucket/two") != first
    assert find_data("s3://bucket/one") == first
    assert not list(first.iterdir())


@pytest.mark.once
def test_s3_input_asks_for_its_data(alone: Alone) -> None:
    with pytest.raises(AssertionError, match="the following arguments are required: --data"):
        alone(S3_INPUT)
