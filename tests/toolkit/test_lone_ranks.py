from pathlib import Path

import pytest

from shoal_toolkit.job.lone_ranks import describe_lone_ranks

ALONE = "import torch\n\nmodel = torch.compile(torch.nn.Linear(2, 1))\ntorch.save(model, 'model.pt')\n"


@pytest.mark.parametrize(
    ("count", "file", "text", "is_told"),
    [
        (2, "helper.py", "", True),
        (1, "helper.py", "", False),
        (2, "lib/comm.py", "import torch.distributed as dist", False),
        (2, "go.sh", "exec torchrun train.py", False),
        (2, "helper.py", "import os\nrank = int(os.environ['RANK'])", False),
        (2, "helper.py", "from mpi4py import MPI", False),
        (2, "README.md", "distributed training", True),
    ],
)
def test_ranks_that_do_not_know_of_each_other_are_told(
    tmp_path: Path, count: int, file: str, text: str, is_told: bool
) -> None:
    (tmp_path / "train.py").write_text(ALONE)
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text)
    notes = describe_lone_ranks(count, str(tmp_path))
    assert [f"{count} ranks start" in note for note in notes] == [True] * is_told


def test_a_file_that_cannot_be_read_hides_the_note(tmp_path: Path) -> None:
    (tmp_path / "broken.py").symlink_to("nowhere")
    assert describe_lone_ranks(2, str(tmp_path)) == []
