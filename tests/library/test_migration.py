"""The scripts of the guides under docs/migrate: a block `diff` has the script before and after the migration."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.library.conftest import Mpirun

GUIDES = Path(__file__).parents[2] / "docs" / "migrate"


def read_block(guide: str, language: str) -> str:
    """Return the first block of a guide in this language that imports torch."""
    text = (GUIDES / guide).read_text()
    blocks: list[str] = re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return next(block for block in blocks if "import torch" in block)


def read_version(guide: str, sign: str) -> str:
    """Return one side of a block `diff`: the lines with this sign, and the lines without a sign."""
    lines = read_block(guide, "diff").splitlines()
    return "\n".join(line[1:] for line in lines if line[:1] in ("", " ", sign))


def run_on_two_ranks(mpirun: Mpirun, script: Path, text: str) -> str:
    """Run a script, and return the line that it prints."""
    script.write_text(text)
    return mpirun(2, script).strip()


@pytest.mark.mpi
def test_the_first_generation_and_the_backend_train_alike(mpirun: Mpirun, tmp_path: Path) -> None:
    before, after = (
        run_on_two_ranks(mpirun, tmp_path / "train.py", read_version("smdistributed.md", sign)) for sign in "-+"
    )
    assert re.fullmatch(r"loss 0\.\d+ with 2 ranks", before)
    assert before == after


@pytest.mark.mpi
def test_the_script_for_horovod_learns_after_its_migration(mpirun: Mpirun, tmp_path: Path) -> None:
    printed = run_on_two_ranks(mpirun, tmp_path / "train.py", read_version("horovod.md", "+"))
    assert re.fullmatch(r"loss 0\.00\d+ with 2 ranks", printed), printed
    assert (tmp_path / "model.pt").exists()


@pytest.mark.mpi
def test_the_model_parallel_script_learns_unchanged(mpirun: Mpirun, tmp_path: Path) -> None:
    printed = run_on_two_ranks(mpirun, tmp_path / "train.py", read_block("smdistributed.md", "python"))
    assert re.search(r"loss 0\.\d+ on 2 stages", printed), printed
