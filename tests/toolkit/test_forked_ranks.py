"""Ranks that are forked from a process which has imported their frameworks: as from a fresh interpreter."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from shoal_toolkit.sidecars.script_imports import Imported, find_imports

from .conftest import Run, Tree
from .test_plan import MACHINE, planned

RANKS = {
    "sagemaker_torch_distributed_enabled": True,
    "sagemaker_mpi_num_of_processes_per_host": 2,
    "sagemaker_program": "train.py",
}


def write(directory: Path, **files: str) -> None:
    for name, text in files.items():
        path = directory / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_imports_are_found_in_the_script_and_its_own_modules(tmp_path: Path) -> None:
    write(
        tmp_path,
        train="import torch.nn as nn, mine.data\nfrom helper import f\nfrom missing import g\n",
        helper="from torchvision import transforms\nimport train\ndef f():\n    import pandas\n",
        mine__data="from . import sizes\nfrom .deep.down import x\n",
        mine__sizes="try:\n    from numpy import random\nexcept ImportError:\n    pass\nif 0:\n    import scipy\n",
        mine__deep__down="def broken(:\n",
    )
    (tmp_path / "mine" / "__init__.py").write_text("")
    found = find_imports([str(tmp_path / "train.py")], [str(tmp_path)])
    assert found == [
        Imported("torch.nn", "", True),
        Imported("missing", "g", True),
        Imported("torchvision", "transforms", True),
        Imported("pandas", "", False),
        Imported("numpy", "random", True),
        Imported("scipy", "", False),
    ]
    assert find_imports(["-m", "mine.data"], [str(tmp_path)]) == found[4:]
    assert find_imports([str(tmp_path / "none.py")], [str(tmp_path)]) == []


def test_imports_of_an_installed_package_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, trainer__main="from trainer import model\n", trainer__model="import torch\n")
    (tmp_path / "trainer" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_imports(["-m", "trainer.main"], ["/nowhere"]) == [Imported("torch", "", True)]


@pytest.mark.parametrize(
    ("program", "variables", "forked"),
    [
        ("train.py", {}, True),
        ("train.py", {"SHOAL_STANDBY": "0"}, False),
        ("train.sh", {}, False),
        ("train.py", {"SHOAL_REHEARSE": "1"}, False),
    ],
    ids=["a script", "switched off", "a shell script", "a rehearsal"],
)
def test_the_plan_says_how_ranks_start(tree: Tree, program: str, variables: dict[str, str], forked: bool) -> None:
    tree.script("")
    (tree.base / "code" / "train.sh").write_text("exec true")
    tree.hyperparameters(**{**RANKS, "sagemaker_program": program})
    made = planned(tree, MACHINE, (), SAGEMAKER_PROGRAM=program, **variables)
    reasons = [reason for reason in made.reasons if reason.startswith("ranks: ")]
    assert (made.forks_ranks, "forks the ranks" in reasons[0], len(reasons)) == (forked, forked, 1)
    assert ("shoal_toolkit.sidecars.standby" in made.command) is forked


# What a script may ask about its interpreter; numpy is imported before the fork.
SHOW = """\
import atexit, inspect, json, multiprocessing, os, pickle, random, signal, sys, threading
import numpy
class Thing:
    pass
def double(x):
    return 2 * x
if __name__ == "__main__":
    atexit.register(lambda: print("the end of", os.environ["RANK"], flush=True))
    main = sys.modules["__main__"]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        doubled = pool.map(double, [1, 2])
    print("shown " + json.dumps({
        "names": sorted(vars(main)), "file": __file__, "loader": type(__loader__).__name__, "spec": __spec__,
        "argv": sys.argv, "orig": sys.orig_argv, "path": sys.path, "flags": str(sys.flags), "doubled": doubled,
        "class": pickle.dumps(Thing()).hex(), "source": inspect.getsource(double), "cwd": os.getcwd(),
        "signals": [str(signal.getsignal(number)) for number in (1, 2, 13, 15)], "threads": threading.active_count(),
        "mask": sorted(map(int, signal.pthread_sigmask(0, []))), "stdin": sys.stdin.read(1), "umask": os.umask(0),
        "stdout": [sys.stdout.line_buffering, sys.stdout.isatty(), sys.stdout.encoding], "nice": os.nice(0),
        "affinity": len(os.sched_getaffinity(0)), "variables": sorted(
            name for name in os.environ if not name.startswith(("TORCHELASTIC_", "ROLE_", "GROUP_")) and name != "_"),
    }), flush=True)
    print("drawn", random.random(), numpy.random.rand(), flush=True)
"""


def shown(out: str) -> tuple[list[Any], list[str]]:
    """What the ranks showed, and what they drew."""
    rows = [json.loads(text) for text in re.findall(r"shown (.*)", out)]
    return sorted(rows, key=json.dumps), re.findall(r"drawn (.*)", out)


def test_a_script_sees_a_fresh_interpreter(tree: Tree, run: Run) -> None:
    tree.script(SHOW)
    tree.hyperparameters(**RANKS, epochs=3)
    ended = [run(SHOAL_STANDBY=value) for value in ("1", "0")]
    assert [each.code for each in ended] == [0, 0], ended
    (forked, drawn), (fresh, _) = [shown(each.out) for each in ended]
    assert forked == fresh
    assert len(forked) == 2 and len(set(drawn)) == 2
    assert all(ended[0].out.count(f"the end of {rank}") == 1 for rank in (0, 1))


def test_packages_that_do_not_survive_a_fork_are_imported_by_the_ranks(tree: Tree, run: Run, tmp_path: Path) -> None:
    """One starts a thread, one fails, and one only says something, which every rank repeats."""
    packages = tmp_path / "packages"
    say = "import os, sys; print('imported by', os.getpid()); print('warned', file=sys.stderr)\n"
    write(
        packages,
        lightning="import threading, time\nwork = threading.Thread(target=time.sleep, args=(2,)); work.start()\n",
        accelerate="raise ImportError('no luck')\n",
        transformers=say,
    )
    tree.script(
        "import os, lightning, transformers\n"
        "try:\n    import accelerate\nexcept ImportError as error:\n    print(error)\n"
        "import torch\nprint('drawn', torch.rand(1).item())\n"
        "print('alive', lightning.work.is_alive(), os.getpid(), flush=True)\n"
    )
    tree.hyperparameters(**RANKS)
    done = run(PYTHONPATH=str(packages))
    assert done.code == 0, done.err
    assert (done.out.count("alive True"), done.out.count("no luck"), done.err.count("warned")) == (2, 2, 2)
    importers, ranks = re.findall(r"imported by (\d+)", done.out), re.findall(r"alive True (\d+)", done.out)
    assert len(importers) == 2 and len(set(importers)) == 1, "once, and written by both ranks"
    assert not {*importers} & {*ranks}
    assert len(set(re.findall(r"drawn (.*)", done.out))) == 2
