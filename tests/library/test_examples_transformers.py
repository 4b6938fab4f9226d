"""The examples with Hugging Face's transformers, on tiny models that are made here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.launching import warm_python

if TYPE_CHECKING:
    from tests.library.conftest import Alone, Mpirun, Python

EXAMPLES = Path(__file__).parents[2] / "examples"
TRANSFORMERS = (
    "transformers.trainer",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.integrations.integration_utils",
)
pytestmark = [pytest.mark.mpi, pytest.mark.xdist_group("transformers")]  # one worker imports transformers


@pytest.fixture(scope="module")
def python() -> Python:
    """Ranks start with transformers imported, which takes some seconds."""
    return lambda **_: [warm_python("torch", *TRANSFORMERS)]


@pytest.mark.long
def test_fine_tuning_on_two_ranks_resumes(mpirun: Mpirun, alone: Alone, python: Python, tmp_path: Path) -> None:
    alone(EXAMPLES / "transformer" / "prepare.py", ".")
    (tmp_path / "model").rename(tmp_path / "tiny")
    script, options = EXAMPLES / "transformer" / "train.py", ("--model", "tiny", "--lr", "0.005")
    log = mpirun(2, script, *options, "--epochs", "2")
    assert "test accuracy" in log
    assert "world size 2" in log
    assert (tmp_path / "model" / "model.safetensors").exists()

    (tmp_path / "empty").mkdir()
    elsewhere = (":", "-np", 1, *python(), script, *options, "--checkpoint-dir", "empty")
    with pytest.raises(AssertionError, match=r"rank 0 has checkpoint-\d+, and rank 1 has none\. Fix: use a directory"):
        mpirun(1, script, *options, *elsewhere)

    alone(script, *options, "--epochs", "3", "--model-dir", "resumed")
    newest = max((tmp_path / "checkpoints").iterdir(), key=lambda path: int(path.name.partition("-")[2]))
    epochs = [each["epoch"] for each in json.loads((newest / "trainer_state.json").read_text())["log_history"]]
    assert epochs[:2] == [1.0, 2.0], "the epochs before are of the two ranks"
    assert epochs[-1] == 3.0


@pytest.mark.long
def test_gpt2_of_transformers_on_two_stages(mpirun: Mpirun, alone: Alone, tmp_path: Path) -> None:
    log = mpirun(2, EXAMPLES / "pipeline-gpt2" / "train_gpt2.py", "--steps", "20", "--log-every", "10")
    losses = [float(line.split()[-1]) for line in log.splitlines() if line.startswith("step ")]
    assert len(losses) == 2
    assert losses[1] < losses[0] < 5.6
    load = "from transformers import GPT2LMHeadModel as M; print(M.from_pretrained('model').config.n_layer)"
    assert alone("-c", load).strip() == "4"
