"""Runs blocks of shell commands of pages in a copy of the repository, and compares the output with the page's."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from .blocks import ROOT, Block

_NUMBER = re.compile(r"\d[\d.,:-]*(?<![.,:-])")
_RULE = re.compile("─+")
_JOB = re.compile(r"\d{8}-\d{6}-[0-9a-f]{6}")
FIX = (
    "Fix: mend the page, or mark the block: <!-- run with Docker -->, or if it cannot run here: <!-- not run: needs a"
    " GPU -->"
)


def copy_repository(root: Path) -> None:
    """Clones the repository into `root`, with uncommitted changes, this virtual environment, and tests/docs/files.

    A clone has the commits, by which images are labelled. So builds in it find the images of the repository.
    """
    subprocess.run(["git", "clone", "--quiet", ROOT, root], check=True)
    changed = ["git", "diff", "--name-only", "-z", "HEAD"]
    new = ["git", "ls-files", "-z", "--others", "--exclude-standard"]
    ran = [subprocess.run(each, cwd=ROOT, check=True, text=True, capture_output=True) for each in (changed, new)]
    for name in "".join(each.stdout for each in ran).split("\0"):
        if (ROOT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, root / name)
    shutil.copytree(Path(__file__).parent / "files", root, dirs_exist_ok=True)
    (root / ".venv").symlink_to(sys.prefix)


def directory_of(block: Block, copy: Path) -> Path:
    """Where a block's commands begin: in the example's directory, or in the root if they name `examples/`."""
    in_root = not block.page.startswith("examples/") or " examples/" in block.source
    return copy if in_root else (copy / block.page).parent


def run_blocks(blocks: Iterable[Block], directory: Path, environ: dict[str, str]) -> int:
    """Runs the blocks of a page in one shell that begins in `directory`, and returns the number of commands.

    `environ` is added to this process's environment, without the variables of jobs and of make. The home directory is
    in it. Raises `AssertionError` if a command fails, or prints another text than the page shows.
    """
    commands = [(block, command) for block in blocks for command in block.commands]
    script = "".join(f"{command.text}\nprintf '\\0%s\\0' $?\n" for _, command in commands)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SM_", "SHOAL_", "MAKE"))}
    ended = subprocess.run(
        ["bash", "-c", script],
        stdin=subprocess.DEVNULL,
        env=kept | {"PATH": f"{sys.prefix}/bin:{os.environ['PATH']}", "COLUMNS": "120"} | environ,
        cwd=directory,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
        timeout=550,
    )
    parts = ended.stdout.split("\0")
    assert len(parts) == 2 * len(commands) + 1, f"{commands[0][0]}: a command ended the shell:\n{ended.stdout}\n{FIX}"
    for index, (block, command) in enumerate(commands):
        output, code = parts[2 * index], parts[2 * index + 1]
        fails = command.output.startswith("shoal: ")
        assert (code != "0") == fails, f"{block}: {command.text} ended with {code}:\n{output}\n{FIX}"
        assert is_as_shown(output, command.output), f"{block}: {command.text} printed:\n{output}\n{FIX}"
    return len(commands)


def is_as_shown(output: str, shown: str) -> bool:
    """Whether an output has the text that a page shows.

    Numbers and the ends of jobs' names may differ; `...` and `…` stand for any text.
    """
    if not shown.strip():
        return True
    parts = re.split(r" ?(?:\.\.\.|…) ?", _normalise(shown))
    return re.fullmatch(".*?".join(map(re.escape, parts)), _normalise(output), re.DOTALL) is not None


def _normalise(text: str) -> str:
    return " ".join(_NUMBER.sub("0", _RULE.sub("─", _JOB.sub("0", text))).split())
