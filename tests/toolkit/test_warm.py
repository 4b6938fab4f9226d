"""A host that is made ready before its job: `train` imports, waits for a file, and runs the source of that time."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path
from typing import Any

import pytest

import shoal_toolkit
from shoal_toolkit.run import warm
from shoal_toolkit.system.account import build_account_variables

from .conftest import TRAIN, Tree, clean_environment
from .netns import UNAVAILABLE, running, two_hosts

LIMIT = 60
ONE: dict[str, Any] = {"sagemaker_program": "train.py"}
TWO = {**ONE, "sagemaker_mpi_num_of_processes_per_host": 2}
LAUNCHERS = {
    "no launcher": (ONE, 1),
    "torchrun": ({**TWO, "sagemaker_torch_distributed_enabled": True}, 2),
    "mpirun": ({**TWO, "sagemaker_mpi_enabled": True}, 2),
}
# A package of data/standby.json that says where it was imported.
PACKAGE = """\
import os
importer = os.getpid()
with open(os.path.join(os.environ["IMPORTED"], str(importer)), "w") as file:
    file.write("done")
"""
SCRIPT = """\
import json, os, sys
import transformers
forked = transformers.importer != os.getpid()
print("ran " + json.dumps({"forked": forked, "version": VERSION, "argv": sys.argv[1:]}), flush=True)
"""


def install(directory: Path, package: str = PACKAGE) -> list[str]:
    """Make a Python with a package of ours among the installed ones, and return its `train`."""
    venv.create(directory, symlinks=True)
    python = directory / "bin/python"
    packages = directory / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    (packages / "transformers.py").write_text(package)
    (packages / "toolkit.pth").write_text(str(Path(shoal_toolkit.__file__).parents[1]))
    theirs = Path(sys.prefix)
    found = [*theirs.glob("*"), *theirs.glob("bin/*"), *theirs.glob("lib/*")]
    found += [path for name in ("mpi4py*", "pip*") for path in Path(sysconfig.get_path("purelib")).glob(name)]
    for path in found:  # Open MPI, mpi4py and pip
        place = directory / path.relative_to(theirs)
        if not place.exists():
            place.symlink_to(path)
    return [str(python), *TRAIN[1:]]


class Waiting:
    """A `train` that waits, and has imported."""

    def __init__(self, tree: Tree, directory: Path, package: str = PACKAGE) -> None:
        self.train, self.tree = install(directory, package), tree
        self.start_file, self.imported = directory / "start", directory / "imported"
        self.imported.mkdir()
        self.process = self.start({})
        try:
            self._wait_for_imports()
        except BaseException:
            self.process.kill()
            raise

    def _wait_for_imports(self) -> None:
        until = time.monotonic() + LIMIT
        while not [path for path in self.imported.iterdir() if path.read_text()]:
            assert time.monotonic() < until and self.process.poll() is None
            time.sleep(0.02)

    def start(self, variables: dict[str, str]) -> subprocess.Popen[str]:
        ours = {"IMPORTED": str(self.imported), "SHOAL_START_FILE": str(self.start_file), **variables}
        env = clean_environment(SAGEMAKER_BASE_DIR=str(self.tree.base), **ours)
        pipe = subprocess.PIPE
        return subprocess.Popen(self.train, env=env, stdout=pipe, stderr=pipe, text=True)

    def run(self) -> list[dict[str, Any]]:
        """Let the job start, and return the lines of its ranks."""
        self.start_file.touch()
        try:
            out, err = self.process.communicate(timeout=LIMIT)
        finally:
            self.process.kill()
        assert self.process.returncode == 0, err
        return [json.loads(line.partition("ran ")[2]) for line in out.splitlines() if "ran " in line]


@pytest.fixture
def waiting(tree: Tree, tmp_path: Path) -> Waiting:
    tree.script(SCRIPT.replace("VERSION", "1"))
    tree.hyperparameters(**ONE)
    return Waiting(tree, tmp_path / "packages")


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_are_forked_with_the_source_and_hyperparameters_of_the_start(
    tree: Tree, tmp_path: Path, launcher: str
) -> None:
    hyperparameters, ranks = LAUNCHERS[launcher]
    tree.script(SCRIPT.replace("VERSION", "1"))
    tree.hyperparameters(**hyperparameters, epochs=1)
    waiting = Waiting(tree, tmp_path / "packages")
    tree.script(SCRIPT.replace("VERSION", "helper.version"))
    tree.script(
        SCRIPT.replace("import transformers", "import transformers, helper").replace("VERSION", "helper.version")
    )
    tree.script("version = 2", "helper.py")
    epochs = 1 if launcher == "mpirun" else 3
    tree.hyperparameters(**hyperparameters, epochs=epochs)
    assert waiting.run() == [{"forked": True, "version": 2, "argv": ["--epochs", str(epochs)]}] * ranks
    assert len(list(waiting.imported.iterdir())) == 1
    assert tree.report["launch_seconds"] < LIMIT, "the time of waiting does not count"


@pytest.mark.mpi
@pytest.mark.skipif(bool(UNAVAILABLE), reason=UNAVAILABLE)
@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_ranks_of_two_hosts_are_forked(tmp_path: Path, launcher: str) -> None:
    """Each `train` is PID 1 of its host, and accepts members of the job only, as with `shoal run`."""
    imported, start_file = tmp_path / "imported", tmp_path / "start"
    imported.mkdir()
    own = PACKAGE.replace("str(importer)", "f'{os.uname().nodename}-{importer}'")
    train = install(tmp_path / "packages", own)
    variables = {"IMPORTED": str(imported), "SHOAL_START_FILE": str(start_file)}
    secret = {"SHOAL_MEMBERS_ONLY": "1", "SHOAL_JOB_SECRET": "a secret of the test"}
    with two_hosts(tmp_path) as hosts:
        for host in hosts:
            host.tree.script(SCRIPT.replace("VERSION", "1"))
            host.tree.hyperparameters(**LAUNCHERS[launcher][0])
        processes = [host.start(train=train, **variables, **secret) for host in hosts]
        with running(*processes):
            until = time.monotonic() + LIMIT
            while len([path for path in imported.iterdir() if path.read_text()]) < 2:
                assert time.monotonic() < until and all(process.poll() is None for process in processes)
                time.sleep(0.02)
            for host in hosts:
                host.tree.script(SCRIPT.replace("VERSION", "2"))
            start_file.touch()
            done = [host.finished(process) for host, process in zip(hosts, processes)]
    rows = [json.loads(text) for each in done for text in re.findall("ran (.*)", each.out)]
    assert [each.code for each in done] == [0, 0], done
    assert rows == [{"forked": True, "version": 2, "argv": []}] * 4, done
    assert len(list(imported.iterdir())) == 2, "each host has imported once, before the job"


CHANGES = {
    "an import less": {"train.py": "print('ran {\"forked\": false}')"},
    "a variable before the import": {"train.py": "import os\nos.environ['HF_HOME'] = '/x'\n" + SCRIPT},
    "a module with the name of an installed one": {"queue.py": "from _queue import *\n"},
    "another version of an imported package": {"transformers.py": "importer = __import__('os').getpid()\n"},
    "a requirement": {"requirements.txt": "--no-index\n"},
}


def test_ranks_of_mpirun_get_other_hyperparameters_too(tree: Tree, tmp_path: Path) -> None:
    """The standby has their command from its start, so a new one forks them."""
    hyperparameters, ranks = LAUNCHERS["mpirun"]
    tree.script(SCRIPT.replace("VERSION", "1"))
    tree.hyperparameters(**hyperparameters, epochs=1)
    waiting = Waiting(tree, tmp_path / "packages")
    tree.hyperparameters(**hyperparameters, epochs=3)
    assert waiting.run() == [{"forked": True, "version": 1, "argv": ["--epochs", "3"]}] * ranks
    assert len(list(waiting.imported.iterdir())) == 2


@pytest.mark.parametrize("change", CHANGES)
def test_ranks_are_not_forked_if_the_imports_may_be_others(tree: Tree, waiting: Waiting, change: str) -> None:
    for name, text in CHANGES[change].items():
        tree.script(text.replace("VERSION", "2"), name)
    assert [row["forked"] for row in waiting.run()] == [False]


def test_a_job_that_could_not_be_planned_early_starts_all_the_same(tree: Tree, tmp_path: Path) -> None:
    (tmp_path / "packages" / "imported").mkdir(parents=True)
    start = tmp_path / "start"
    env = clean_environment(SAGEMAKER_BASE_DIR=str(tree.base), SHOAL_START_FILE=str(start))
    process = subprocess.Popen(TRAIN, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    tree.script("print('it runs')")
    tree.hyperparameters(**ONE)
    start.touch()
    out, _ = process.communicate(timeout=LIMIT)
    assert (process.returncode, "it runs" in out) == (0, True), out


@pytest.mark.parametrize("name", ["opt_einsum", "sitecustomize"])
def test_no_module_of_the_last_source_reaches_the_next_run(tree: Tree, tmp_path: Path, name: str) -> None:
    """A framework may import a module that is not installed, and Python itself does when it starts."""
    script = SCRIPT.replace("import transformers", f"import transformers, {name}").replace("VERSION", f"{name}.version")
    tree.script(script)
    tree.script("version = 1", f"{name}.py")
    tree.hyperparameters(**ONE)
    waiting = Waiting(tree, tmp_path / "packages", f"try:\n    import {name}\nexcept ImportError:\n    pass\n{PACKAGE}")
    tree.script("version = 'two'", f"{name}.py")
    assert waiting.run() == [{"forked": False, "version": "two", "argv": []}]


def test_nothing_is_imported_early_with_a_pythonpath(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree.script("import transformers")
    tree.hyperparameters(**ONE)
    (tree.base / "code/vendor").mkdir()
    started = []
    monkeypatch.setattr(warm, "start_process", lambda *words, **options: started.append(words))
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tree.base))
    monkeypatch.setenv("PYTHONPATH", str(tree.base / "code/vendor"))
    monkeypatch.setenv("SHOAL_START_FILE", str(tmp_path))  # it exists
    assert (warm.wait_for_start([]), started) == (None, [])


def test_the_standby_and_the_script_have_the_same_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("SHOAL_START_FILE", str(tmp_path))  # it exists
    homes: list[str | None] = []
    monkeypatch.setattr(warm, "_start", lambda words: homes.append(os.environ["HOME"]))
    warm.wait_for_start([])
    assert build_account_variables(os.environ).get("HOME", os.environ["HOME"]) == homes[0] != "/"
