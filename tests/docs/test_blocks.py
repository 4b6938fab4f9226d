"""Every block of shell commands and Python in tutorials and how-to pages is executed, or says why it is not.

A page can mark a block in the line before it. So there are four levels:

- **run**: a block without a mark. Shell commands run in a copy of the repository, with a small `train.py` and no
  Docker. If the page shows output, the real output has the same text. Numbers may differ, and `...` or `…` stands for
  any text. Python runs in a process for each page, with the names of `run_python.py`, such as `model` and `loader`.
- **run with Docker**: a block marked `<!-- run with Docker -->`. tests/integration/test_pages.py runs it with the
  images. Here it is parsed.
- **parsed**: a block marked `<!-- not run: REASON -->`, because it needs a cluster, a GPU or AWS, or takes long. The
  parser of each command accepts its options, and files, images and targets exist (`command_lines.py`). Marked Python
  is parsed, and uses names that `smdistributed` has.
- **syntax**: commands in a marked block for which there is no parser here, such as kubectl. Bash accepts them, and
  files of the repository exist.

The end of a run of pytest has the number of commands and Python blocks of each level.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from .blocks import PAGES, PYTHON, ROOT, SHELL, find_blocks
from .command_lines import Place, check_imported_names, check_shell
from .shell_blocks import FIX, copy_repository, directory_of, is_as_shown, run_blocks

REASONS = re.compile(r"(needs|installs|takes|uses) \w.+")
BLOCKS = [block for page in PAGES for block in find_blocks(page)]
SHELL_RUN = [each for each in BLOCKS if each.language in SHELL and not each.reason and not each.with_docker]
HERE = Path(__file__).parent
Record = Callable[[str, object], None]
pytestmark = pytest.mark.xdist_group("blocks")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("blocks") / "shoal"
    copy_repository(root)
    return root


def test_each_mark_has_a_reason() -> None:
    for block in BLOCKS:
        assert not block.reason or REASONS.fullmatch(block.reason), f"{block}: begin the reason with needs or takes"


@pytest.mark.parametrize("page", sorted({block.page for block in SHELL_RUN}))
def test_commands_run(page: str, copy: Path, tmp_path: Path, record_property: Record) -> None:
    environ = {
        "HOME": str(tmp_path),
        "DOCKER_HOST": "unix:///nonexistent",
        "SAGEMAKER_BASE_DIR": str(tmp_path / "ml"),
        "SAGEMAKER_SUBMIT_DIRECTORY": str(copy / "code"),
        "SAGEMAKER_PROGRAM": "train.py",
        "SHOAL_MEMBERS_ONLY": "1",  # --preflight would report the users of other tests' containers
    }
    blocks = [block for block in SHELL_RUN if block.page == page]
    record_property("blocks", {"run": run_blocks(blocks, directory_of(blocks[0], copy), environ)})


def test_marked_commands_are_parsed(copy: Path, record_property: Record) -> None:
    levels: Counter[str] = Counter()
    problems = []
    for block in BLOCKS:
        if block.language in SHELL and (block.reason or block.with_docker):
            place = Place(copy, directory_of(block, copy))
            for command in block.commands:
                try:
                    check_shell(command.text, place)
                except ValueError as error:
                    problems.append(f"{block}: {command.text.strip()}: {error}")
            levels.update(place.levels if block.reason else ())
    assert not problems, "\n".join(problems)
    record_property("blocks", dict(levels))


@pytest.mark.long
def test_python_runs(tmp_path: Path, record_property: Record) -> None:
    pages: dict[str, list[tuple[int, str]]] = {}
    for block in BLOCKS:
        if block.language in PYTHON and not block.reason:
            pages.setdefault(block.page, []).append((block.line, block.source))
    command = [sys.executable, str(HERE / "run_python.py")]
    ended = subprocess.run(
        command, input=json.dumps(pages), cwd=tmp_path, text=True, capture_output=True, check=False, timeout=550
    )
    assert ended.returncode == 0, f"{ended.stdout}{ended.stderr}\n{FIX}"
    record_property("blocks", {"run": sum(map(len, pages.values()))})


def test_marked_python_is_parsed(monkeypatch: pytest.MonkeyPatch, record_property: Record) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    marked = [block for block in BLOCKS if block.language in PYTHON and block.reason]
    for block in marked:
        check_imported_names(block.source)
    record_property("blocks", {"parsed": len(marked)})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("shoal build --quick pytorch", "No such option: --quick"),
        ("shoal build pytorch-training:1.0", "pytorch-training:1.0"),
        ("shoal plan pytorch", "No such command"),
        ("shoal run pytorch none.py", "none.py: no such file"),
        ("SHOAL_MAX_RESTART=3 train", "SHOAL_MAX_RESTART: no page"),
        ("train --explian", "--explain"),
        ("make trian", "trian"),
        ("make train FRAMWORK=pytorch", "FRAMWORK"),
        ("make image IMAGE=pytorch-training:1.0", "pytorch-training:1.0"),
        ("pip install --no-indexes x", "--no-indexes"),
        ("mpirun -npp 2 python examples/gpt2/train.py", "-npp"),
        ("torchrun --nproc-per-nod 2 examples/gpt2/train.py", "--nproc-per-nod"),
        ("torchrun --nproc-per-node 2 examples/ddp/train.py --epoch 3", "--epoch"),
        ("python examples/none.py", "examples/none.py"),
        ("aws batch submit-jobs", "submit-jobs"),
        ("aws batch submit-job --cli-json x", "--cli-json"),
        ("sbatch examples/slurm/none.sbatch", "none.sbatch"),
        ("ls | frobnicate", "frobnicate"),
        ("ls (", "syntax error"),
    ],
)
def test_a_wrong_command_is_found(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        check_shell(text, Place(ROOT, ROOT))


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        ("```shell\nls\n```\n", "'shell' is unknown"),
        ("```\n$ ls\n```\n", "has no language"),
    ],
)
def test_a_block_that_nothing_would_execute_is_refused(block: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(f"# Page\n\n{block}")
    with pytest.raises(ValueError, match=problem):
        find_blocks(tmp_path / "page.md", tmp_path)


def test_a_mark_belongs_to_the_next_block_only(tmp_path: Path) -> None:
    block = "```console\n$ echo '1\n  2' \\\n    3\n1\n```\n"
    (tmp_path / "page.md").write_text(f"<!-- not run: needs a GPU -->\n\n{block}\n{block}")
    first, second = find_blocks(tmp_path / "page.md", tmp_path)
    assert (first.reason, second.reason) == ("needs a GPU", "")
    assert [tuple(each) for each in first.commands] == [("echo '1\n  2' \\\n    3\n", "1\n")]


@pytest.mark.parametrize(
    ("output", "shown", "same"),
    [
        ("4 ranks: 2.04 s\n", "2 ranks:  0.1 s", True),
        ("wrote a\nwrote b\n", "wrote a\n…", True),
        ("wrote a\n", "wrote b\n", False),
        ("wrote a\nfailed\n", "wrote a\n", False),
    ],
)
def test_outputs_are_compared(output: str, shown: str, same: bool) -> None:
    assert is_as_shown(output, shown) is same
