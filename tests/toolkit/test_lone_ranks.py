from pathlib import Path

import pytest

from shoal_toolkit.job.lone_ranks import describe_lone_ranks

ALONE = "import torch\n\nmodel = torch.compile(torch.nn.Linear(2, 1))\ntorch.save(model, 'model.pt')\n"


@pytest.mark.parametrize(
    ("file", "text", "is_told"),
    [
        ("helper.py", "", True),
        ("lib/comm.py", "import torch.distributed as dist", False),
        ("go.sh", "exec torchrun train.py", False),
        ("helper.py", "import os\nrank = int(os.environ['RANK'])", False),
        ("helper.py", "from mpi4py import MPI", False),
        ("README.md", "distributed training", True),
    ],
)
def test_ranks_that_do_not_know_of_each_other_are_told(tmp_path: Path, file: str, text: str, is_told: bool) -> None:
    (tmp_path / "train.py").write_text(ALONE)
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text)
    notes = describe_lone_ranks(2, str(tmp_path))
    assert ["2 ranks start" in note for note in notes] == [True] * is_told


def test_a_file_that_cannot_be_read_hides_the_note(tmp_path: Path) -> None:
    (tmp_path / "broken.py").symlink_to("nowhere")
    assert describe_lone_ranks(2, str(tmp_path)) == []
