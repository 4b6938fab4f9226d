"""The examples, run as users run them: they learn, and leave their files where the contract says."""

from __future__ import annotations

import json
import pickle
import re
import runpy
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from tests.library.conftest import shards_on_the_cpu
from tests.repeats import in_soak

pytestmark = pytest.mark.long

if TYPE_CHECKING:
    from tests.library.conftest import Alone, Mpirun

EXAMPLES = Path(__file__).parents[2] / "examples"
DIGITS, CIFAR10 = EXAMPLES / "digits", EXAMPLES / "extend-pytorch" / "cifar10.py"
GPT2 = EXAMPLES / "gpt2" / "train.py"
BAR = 0.96
FIRST_GENERATION = Path(__file__).parent / "ranks" / "first_generation.py"
FSDP = pytest.param(DIGITS / "train_fsdp.py", marks=shards_on_the_cpu)


def check_digits(model_dir: Path, output_dir: Path, epochs: int, world_size: int) -> None:
    metrics = json.loads((output_dir / "metrics.json").read_text())
    assert metrics["test_accuracy"] >= BAR
    assert metrics["images_per_second"] > 0 and metrics["training_seconds"] > 0
    assert (metrics["epochs"], metrics["world_size"]) == (epochs, world_size)
    weights = torch.load(model_dir / "model.pt")
    assert weights["scores.weight"].shape == (10, 64)
    assert not any(name.startswith("module.") for name in weights)


@pytest.mark.once
@pytest.mark.parametrize(
    "script", [DIGITS / "train.py", in_soak(DIGITS / "train_torch.py"), in_soak(DIGITS / "train_fsdp.py")]
)
def test_digits_train_on_one_rank(alone: Alone, tmp_path: Path, script: Path) -> None:
    log = alone(script, "--epochs", "8", "--lr", "0.003")
    assert log.count("epoch ") == 8
    check_digits(tmp_path / "model", tmp_path / "output", epochs=8, world_size=1)


@pytest.mark.once
@pytest.mark.mpi
@pytest.mark.parametrize("script", [DIGITS / "train.py", in_soak(DIGITS / "train_torch.py"), FSDP, FIRST_GENERATION])
def test_digits_on_two_ranks_from_a_channel(mpirun: Mpirun, alone: Alone, tmp_path: Path, script: Path) -> None:
    channel = tmp_path / "channel"
    alone(DIGITS / "prepare.py", channel)
    contract = {f"SM_{name}": str(tmp_path / name) for name in ("MODEL_DIR", "OUTPUT_DATA_DIR")}
    log = mpirun(2, script, "--epochs", "10", SM_CHANNEL_TRAINING=str(channel), **contract)
    assert log.count("epoch ") == 10, "rank 0 alone prints"
    check_digits(tmp_path / "MODEL_DIR", tmp_path / "OUTPUT_DATA_DIR", epochs=10, world_size=2)


@pytest.mark.once
@pytest.mark.mpi
def test_digits_on_two_replicas_of_four_stages(mpirun: Mpirun, alone: Alone, tmp_path: Path) -> None:
    """8 processes: 2-way data and 4-way model parallel. 640 images in batches of 64, 32 a replica: 10 iterations."""
    channel = tmp_path / "channel"
    alone(DIGITS / "prepare.py", channel)
    contract = {f"SM_{name}": str(tmp_path / name) for name in ("MODEL_DIR", "OUTPUT_DATA_DIR")}
    contract["SM_HP_MP_PARAMETERS"] = '{"partitions": 4, "microbatches": 4, "ddp": true, "pipeline": "interleaved"}'
    compared = Path(__file__).parent / "ranks" / "modelparallel_digits.py"
    log = mpirun(8, compared, "--epochs", "3", "--lr", "0.005", SM_CHANNEL_TRAINING=str(channel), **contract)
    assert "2 replicas of 4 stages, batches of 64: 32 images per replica, in 4 microbatches" in log
    epochs = re.findall(r"epoch \d/3 iterations (\d+) loss ([\d.]+)", log)
    assert [int(iterations) for iterations, _ in epochs] == [10, 10, 10]
    losses = [float(loss) for _, loss in epochs]
    assert losses[0] > losses[1] > losses[2] and losses[2] < losses[0] / 2, losses
    for stage in range(4):
        assert log.count(f"replicas of stage {stage} are equal") == 2
    weights = torch.load(tmp_path / "MODEL_DIR" / "model.pt")
    Net = runpy.run_path(str(DIGITS / "train.py"))["Net"]  # noqa: N806
    Net().load_state_dict(weights)
    metrics = json.loads((tmp_path / "OUTPUT_DATA_DIR" / "metrics.json").read_text())
    assert metrics["world_size"] == 8 and metrics["test_accuracy"] > 0.7


@pytest.mark.once
@pytest.mark.mpi
def test_a_script_in_the_shape_of_awss_mnist_example(mpirun: Mpirun, tmp_path: Path) -> None:
    """2 replicas of 2 stages. The original with its own data was compared by hand: docs/modelparallel.md."""
    log = mpirun(4, Path(__file__).parent / "ranks" / "modelparallel_mnist.py", tmp_path / "partial.pt")
    accuracies = [float(found) for found in re.findall(r"accuracy ([\d.]+)", log)]
    assert len(accuracies) == 4 and min(accuracies) == max(accuracies) > 0.75, log


@pytest.mark.once
def test_digits_under_torchrun(alone: Alone, tmp_path: Path, free_port: int) -> None:
    """On the backend smddp; of the first generation's interface, test_distributed.py."""
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port}")
    log = alone(*torchrun, DIGITS / "train_torch.py", "--epochs", "10")
    assert log.count("epoch ") == 10, "rank 0 alone prints"
    check_digits(tmp_path / "model", tmp_path / "output", epochs=10, world_size=2)


@pytest.mark.once
def test_digits_go_on_from_a_checkpoint(alone: Alone, tmp_path: Path) -> None:
    """As if they had not been stopped, bit for bit."""

    def train(epochs: int, checkpoints: str, model: str) -> str:
        options = {"epochs": epochs, "checkpoint-dir": tmp_path / checkpoints, "model-dir": tmp_path / model}
        return alone(DIGITS / "train_torch.py", *(f"--{name}={value}" for name, value in options.items()))

    train(1, "stopped", "first")
    assert train(2, "stopped", "resumed").count("epoch ") == 1
    train(2, "not-stopped", "at-once")
    resumed, at_once = (torch.load(tmp_path / model / "model.pt") for model in ("resumed", "at-once"))
    assert all(torch.equal(resumed[name], at_once[name]) for name in at_once)


@pytest.mark.once
def test_prepare_writes_the_same_bytes(alone: Alone, tmp_path: Path) -> None:
    from sklearn.datasets import load_digits

    alone(DIGITS / "prepare.py", tmp_path / "a")
    alone(DIGITS / "prepare.py", tmp_path / "b")
    path = tmp_path / "a" / "digits.npz"
    assert path.read_bytes() == (tmp_path / "b" / "digits.npz").read_bytes()
    assert {member.date_time[0] for member in zipfile.ZipFile(path).infolist()} == {1980}, "the time of day is in it"
    with np.load(path) as digits:
        assert np.array_equal(digits["images"], load_digits().images)
        assert np.array_equal(digits["labels"], load_digits().target)


@pytest.mark.once
def test_digits_refuses_bad_input(alone: Alone, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="unrecognized arguments: --epoch-count 3"):
        alone(DIGITS / "train.py", "--epoch-count", "3")
    with pytest.raises(AssertionError, match=r"digits\.npz is missing\. Fix: python prepare\.py"):
        alone(DIGITS / "train.py", SM_CHANNEL_TRAINING=str(tmp_path))


@pytest.mark.once
@pytest.mark.mpi
def test_gpt2_on_two_stages_and_from_its_checkpoint(mpirun: Mpirun, tmp_path: Path) -> None:
    small = ("--steps", "30", "--width", "48", "--layers", "2", "--checkpoint-dir", tmp_path / "kept")
    log = mpirun(2, GPT2, *small, SM_MODEL_DIR=str(tmp_path / "model"))
    losses = [float(line.split()[-1]) for line in log.splitlines()]
    assert len(losses) == 3 and losses[-1] < 2.9 < losses[0]
    weights = torch.load(tmp_path / "model" / "model.pt")
    assert weights["head.weight"].shape == (256, 48)
    assert weights["blocks.1.merge.weight"].abs().sum() > 0
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {"step30_partial", "newest", "newest_partial"}
    resumed = mpirun(1, GPT2, *small, "--partitions", "1", SM_MODEL_DIR=str(tmp_path / "again"))
    assert resumed.startswith("step 40: ") and float(resumed.splitlines()[0].split()[-1]) < 2.9


@pytest.mark.once
def test_cifar10_makes_its_data(alone: Alone, tmp_path: Path) -> None:
    log = alone(CIFAR10)
    assert "instead of CIFAR-10" in log
    assert float(log.split()[-1]) >= 0.9
    assert torch.load(tmp_path / "model" / "model.pt")["scores.weight"].shape == (10, 64)


def test_cifar10_reads_the_python_version(tmp_path: Path) -> None:
    read_batches = runpy.run_path(str(CIFAR10))["read_batches"]
    unpacked = tmp_path / "cifar-10-batches-py"
    unpacked.mkdir()
    rows = np.random.RandomState(0).randint(256, size=(6, 3072), dtype=np.uint8)
    for number, part in ((1, slice(0, 4)), (2, slice(4, 6))):
        batch = {b"data": rows[part], b"labels": list(range(6))[part]}
        (unpacked / f"data_batch_{number}").write_bytes(pickle.dumps(batch))
    images, labels = read_batches(tmp_path, "data_batch_*").tensors
    assert labels.tolist() == [0, 1, 2, 3, 4, 5]
    assert images.shape == (6, 3, 32, 32)
    assert images[5, 2, 0, 1] == torch.tensor(rows[5, 2 * 1024 + 1] / 255, dtype=torch.float32)
    with pytest.raises(FileNotFoundError, match="no test_batch in"):
        read_batches(tmp_path, "test_batch")
