from pathlib import Path

import pytest

from shoal_toolkit.job.lone_ranks import describe_lone_ranks

from .conftest import Run, Tree

ALONE = "import torch\n\nmodel = torch.compile(torch.nn.Linear(2, 1))\ntorch.save(model, 'model.pt')\n"


@pytest.mark.parametrize(
    ("file", "text", "has_note"),
    [
        ("helper.py", "", True),
        ("lib/comm.py", "import torch.distributed as dist", False),
        ("go.sh", "exec torchrun train.py", False),
        ("helper.py", "import os\nrank = int(os.environ['RANK'])", False),
        ("helper.py", "from mpi4py import MPI", False),
        ("README.md", "distributed training", True),
    ],
)
def test_ranks_that_do_not_know_of_each_other_are_reported(
    tmp_path: Path, file: str, text: str, has_note: bool
) -> None:
    (tmp_path / "train.py").write_text(ALONE)
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text)
    notes = describe_lone_ranks(2, str(tmp_path))
    assert ["2 ranks start" in note for note in notes] == [True] * has_note


def test_a_file_that_cannot_be_read_hides_the_note(tmp_path: Path) -> None:
    (tmp_path / "broken.py").symlink_to("nowhere")
    assert describe_lone_ranks(2, str(tmp_path)) == []


MIRRORED = "strategy = tf.distribute.MultiWorkerMirroredStrategy()"


@pytest.mark.parametrize(
    ("text", "sets_tf_config", "is_noted"),
    [
        (MIRRORED, False, True),
        ("s = tf.distribute.experimental.MultiWorkerMirroredStrategy(communication=AUTO)", False, True),
        ("s = CollectiveAllReduceStrategy()", False, True),
        ("s = tf.distribute.experimental.ParameterServerStrategy()", False, True),
        (f"import smdistributed\n{MIRRORED}", False, True),
        (MIRRORED, True, False),
        (f"os.environ['TF_CONFIG'] = config\n{MIRRORED}", False, False),
        ("s = MultiWorkerMirroredStrategy(cluster_resolver=r)", False, False),
        ("s = tf.distribute.MirroredStrategy()", False, False),
        ("# a MultiWorkerMirroredStrategy needs its launcher", False, False),
    ],
)
def test_a_strategy_without_its_launcher_is_noted(
    tmp_path: Path, text: str, sets_tf_config: bool, is_noted: bool
) -> None:
    (tmp_path / "train.py").write_text(text)
    notes = describe_lone_ranks(2, str(tmp_path), sets_tf_config)
    assert ["sagemaker_multi_worker_mirrored_strategy_enabled=true" in note for note in notes] == [True] * is_noted


@pytest.mark.parametrize("strategy", ["none", "sagemaker_multi_worker_mirrored_strategy_enabled"])
def test_the_launcher_of_the_strategy_prevents_the_note(tree: Tree, run: Run, strategy: str) -> None:
    tree.script(MIRRORED)
    tree.hosts("a", "a", "b")
    tree.hyperparameters(**{strategy: True})
    out = run("--explain", SAGEMAKER_PROGRAM="train.py").out
    assert ("finds the other hosts in TF_CONFIG" in out) == (strategy == "none")
