"""Channels in Pipe mode: SageMaker streams them through FIFOs, /opt/ml/input/data/<channel>_<epoch>.

https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-training-algo-running-container.html
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

from .conftest import Run, Tree
from .test_plan import MACHINE, planned

READ_TWO_EPOCHS = """
import json, os, sys
stem = os.environ["SM_CHANNEL_TRAINING"]
print(json.dumps([open(f"{stem}_{epoch}").read().split() for epoch in (0, 1)]))
"""


def configure(tree: Tree) -> Path:
    """A channel in Pipe mode, as in SageMaker: it has no directory. Returns the directory of its FIFOs."""
    tree.configure(
        "inputdataconfig", {"training": {"TrainingInputMode": "Pipe", "S3DistributionType": "ShardedByS3Key"}}
    )
    tree.hyperparameters(sagemaker_program="train.py")
    data = tree.base / "input" / "data"
    data.mkdir()
    return data


def stream(fifo: Path, text: str) -> None:
    """Make a FIFO, and write to it once a script opens it; it ends then, as an epoch does."""
    os.mkfifo(fifo)
    threading.Thread(target=fifo.write_text, args=(text,), daemon=True).start()


def test_a_script_reads_each_epoch_from_its_fifo(tree: Tree, run: Run) -> None:
    data = configure(tree)
    records = [
        " ".join(f"{epoch}-{number}" for number in range(20_000)) for epoch in range(2)
    ]  # more than a pipe holds
    for epoch, text in enumerate(records):
        stream(data / f"training_{epoch}", text)
    tree.script(READ_TWO_EPOCHS)
    done = run()
    assert done.code == 0, done.err
    assert json.loads(done.out) == [text.split() for text in records]
    assert f"the channel training is in Pipe mode: its data are in the FIFO {data}/training_0" in done.err


def test_a_script_that_expects_files_gets_an_error_that_names_the_fifo(tree: Tree, run: Run) -> None:
    configure(tree)
    tree.script("import os\nopen(os.path.join(os.environ['SM_CHANNEL_TRAINING'], 'digits.npz'))\n")
    assert run().code == 1
    assert "In Pipe mode, read the FIFO input/data/CHANNEL_0." in tree.failure


def test_ranks_of_one_host_are_warned_that_they_share_a_fifo(tree: Tree) -> None:
    data = configure(tree)
    tree.hyperparameters(sagemaker_program="train.py", sagemaker_distributed_dataparallel_enabled=True)
    plan = planned(tree, MACHINE._replace(gpus=8))
    assert plan.env["SM_CHANNEL_TRAINING"] == f"{data}/training"
    assert "The 8 ranks of this host share each FIFO: let one of them read it" in " ".join(plan.notes)
