"""Job trees in temporary directories, and `train` run on them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from shoal_toolkit.system.loop import Loop

TRAIN = [sys.executable, "-m", "shoal_toolkit"]
_OURS = ("SM_", "SAGEMAKER_", "SHOAL_", "OMPI_", "PMIX_", "MASTER_", "CUDA_VISIBLE")
_RANKED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PYTHONPATH")


class Tree(NamedTuple):
    """One host's base directory."""

    base: Path

    @property
    def code(self) -> Path:
        return self.base / "code"

    @property
    def output(self) -> Path:
        return self.base / "output"

    def script(self, text: str, name: str = "train.py") -> str:
        (self.code / name).write_text(text)
        return name

    def configure(self, name: str, value: object) -> None:
        (self.base / "input" / "config" / f"{name}.json").write_text(json.dumps(value))

    def hyperparameters(self, **values: object) -> None:
        """Write them as the SDK does: each value encoded once more."""
        self.configure("hyperparameters", {key: json.dumps(value) for key, value in values.items()})

    def hosts(self, current: str, *names: str, **more: object) -> None:
        self.configure("resourceconfig", {"current_host": current, "hosts": list(names), **more})

    @property
    def failure(self) -> str:
        return (self.output / "failure").read_text()

    @property
    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads((self.output / "job.json").read_text())
        return report

    def outcome(self) -> set[str]:
        """The result files that exist."""
        return {name for name in ("failure", "success") if (self.output / name).exists()}


class Finished(NamedTuple):
    """How a run of `train` ended."""

    code: int
    out: str
    err: str


def clean_environment(**more: str) -> dict[str, str]:
    """This process's environment without what a job reads."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OURS) and name not in _RANKED}
    return {**kept, **more}


def make_tree(base: Path) -> Tree:
    for directory in ("input/config", "code", "model"):
        (base / directory).mkdir(parents=True)
    return Tree(base)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """A host with no configuration yet."""
    return make_tree(tmp_path / "ml")


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


Run = Callable[..., Finished]


@pytest.fixture
def run(tree: Tree) -> Run:
    """Run `train` on the tree: run("arg", VARIABLE="value")."""

    def run_train(*arguments: str, **variables: str) -> Finished:
        environment = clean_environment(SAGEMAKER_BASE_DIR=str(tree.base), **variables)
        done = subprocess.run([*TRAIN, *arguments], env=environment, capture_output=True, timeout=60)
        return Finished(done.returncode, done.stdout.decode(), done.stderr.decode())

    return run_train


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
