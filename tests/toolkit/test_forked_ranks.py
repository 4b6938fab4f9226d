"""Ranks that are forked from a process which has imported their frameworks: as from a fresh interpreter."""

from __future__ import annotations

import gzip
import json
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal_toolkit.sidecars.script_imports import Imported, find_imports
from shoal_toolkit.sidecars.standby import choose_imports

from .conftest import Run, Tree
from .test_plan import MACHINE, planned

TWO = {"sagemaker_mpi_num_of_processes_per_host": 2, "sagemaker_program": "train.py"}
RANKS = {"sagemaker_torch_distributed_enabled": True, **TWO}
MPI = {"sagemaker_mpi_enabled": True, **TWO}
LAUNCHERS = pytest.mark.parametrize("launcher", [RANKS, MPI], ids=["torchrun", "mpirun"])


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


@pytest.mark.parametrize(
    ("before", "found"),
    [
        ("os.environ['HF_HOME'] = '/data'", False),
        ("os.environ.setdefault('OMP_NUM_THREADS', '1')", False),
        ("sys.path.insert(0, 'vendored')", False),
        ("subprocess.check_call(['pip', 'install', 'transformers'])", False),
        ("os.environ['WANDB_MODE'] = 'offline'", True),
        ("print(os.environ.get('RANK'))", True),
        ("def main():\n    os.environ['HF_HOME'] = '/data'", True),
    ],
)
def test_a_script_that_prepares_its_imports_is_left_alone(tmp_path: Path, before: str, found: bool) -> None:
    write(tmp_path, train=f"import os, subprocess, sys\n{before}\nimport transformers\n")
    names = [each.module for each in find_imports([str(tmp_path / "train.py")], [str(tmp_path)])]
    assert names == (["os", "subprocess", "sys", "transformers"] if found else [])
    write(tmp_path, after=f"import os, subprocess, sys\nimport transformers\n{before}\n")
    assert find_imports([str(tmp_path / "after.py")], [str(tmp_path)])


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("import torch, os, numpy", False),
        ("import torch, re\nre.compile('')", True),
        ("import re\nre.compile('')", False),
        ("import torch\ntorch.optim.SGD([])", True),
        ("import torch\nfrom torch import optim", True),
        ("import torch\nfrom torch.optim import Adam", True),
        ("import torch\nfrom torch.nn.parallel import DistributedDataParallel as DDP", False),
        ("import torch\nfrom torch.nn.parallel import DistributedDataParallel as DDP\nDDP(1)", True),
        ("import torch\nimport timm", True),
        ("import torch\nimport mine", True),
    ],
)
def test_the_compiler_of_torch_is_imported_only_if_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, expected: bool
) -> None:
    write(tmp_path, train=script, mine="import torch.nn.parallel as p\ndef f(x):\n    p.DistributedDataParallel(x)\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    chosen = choose_imports([str(tmp_path / "train.py")], [])
    assert (("torch._dynamo", "") in chosen) is expected
    assert (("torch", "") in chosen) is ("torch" in script)


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


@pytest.mark.parametrize("launcher", ["accelerate", "deepspeed"])
def test_the_plan_says_which_launcher_starts_ranks_itself(tree: Tree, launcher: str) -> None:
    tree.script("")
    tree.hyperparameters(**{f"sagemaker_{launcher}_enabled": True}, **TWO)
    made = planned(tree, MACHINE)
    assert f"ranks: {launcher} starts them, and each imports the script's frameworks" in made.reasons
    assert not made.forks_ranks


# What a script may ask about its interpreter; numpy is imported before the fork.
SHOW = """\
import atexit, ctypes, inspect, json, multiprocessing, os, pickle, random, signal, sys, threading
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
        "forked": "sidecars.standby" in open("/proc/self/cmdline").read(),
        "affinity": len(os.sched_getaffinity(0)), "variables": sorted(
            name for name in os.environ if not name.startswith(("TORCHELASTIC_", "ROLE_", "GROUP_")) and name != "_"),
    }), flush=True)
    print("drawn", random.random(), numpy.random.rand(), flush=True)
    left_open = os.fdopen(os.dup(1), "w", 1000)
    left_open.write(f"written by {os.environ['RANK']}\\n")
    ctypes.CDLL(None).printf(b"printed by %s\\n", os.environ["RANK"].encode())
    os.setsid()
"""


def shown(out: str) -> tuple[list[Any], list[str]]:
    """What the ranks showed, and what they drew."""
    rows = [json.loads(text) for text in re.findall(r"shown (.*)", out)]
    return sorted(rows, key=json.dumps), re.findall(r"drawn (.*)", out)


@pytest.fixture
def _hangup() -> Iterator[None]:
    """SIGHUP has its default, also under `nohup`: torchrun handles it, and its ranks then begin with the default."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@LAUNCHERS
@pytest.mark.usefixtures("_hangup")
def test_a_script_sees_a_fresh_interpreter(tree: Tree, run: Run, launcher: dict[str, Any]) -> None:
    tree.script(SHOW)
    tree.hyperparameters(**launcher, epochs=3)
    ended = [run(SHOAL_STANDBY=value) for value in ("1", "0")]
    assert [each.code for each in ended] == [0, 0], ended
    (forked, drawn), (fresh, _) = [shown(each.out) for each in ended]
    assert [row.pop("forked") for row in (*forked, *fresh)] == [True, True, False, False]
    assert forked == fresh
    assert len(forked) == 2 and len(set(drawn)) == 2
    last_words = [f"{what} {rank}" for what in ("the end of", "written by", "printed by") for rank in (0, 1)]
    assert [each.out.count(words) for each in ended for words in last_words] == [1] * 12


@LAUNCHERS
def test_packages_that_do_not_survive_a_fork_are_imported_by_the_ranks(
    tree: Tree, run: Run, tmp_path: Path, launcher: dict[str, Any]
) -> None:
    """One starts a thread, one fails, and one only says something, which every rank repeats."""
    packages = tmp_path / "packages"
    say = "import os, sys; os.environ['TF_SET'] = 'yes'\n"
    say += "print('imported by', os.getpid()); print('warned', file=sys.stderr)\n"
    write(
        packages,
        pandas="import threading, time\nwork = threading.Thread(target=time.sleep, args=(2,)); work.start()\n",
        accelerate="raise ImportError('no luck')\n",
        transformers=say,
    )
    tree.script(
        "import os, pandas, transformers\n"
        "try:\n    import accelerate\nexcept ImportError as error:\n    print(error)\n"
        "import torch\nprint('drawn', torch.rand(1).item())\n"
        "print('variable', os.environ['TF_SET'])\n"
        "print('alive', pandas.work.is_alive(), os.getpid(), flush=True)\n"
    )
    tree.hyperparameters(**launcher)
    done = run(PYTHONPATH=str(packages))
    assert done.code == 0, done.err
    assert (done.out.count("alive True"), done.out.count("no luck"), done.err.count("warned")) == (2, 2, 2)
    importers, ranks = re.findall(r"imported by (\d+)", done.out), re.findall(r"alive True (\d+)", done.out)
    assert len(importers) == 2 and len(set(importers)) == 1, "once, and written by both ranks"
    assert not {*importers} & {*ranks}
    assert done.out.count("variable yes") == 2, "set by an import"
    assert len(set(re.findall(r"drawn (.*)", done.out))) == 2


ENDS = """\
import atexit, ctypes, gzip, os, sys, threading, time
early = open(os.path.join(os.environ["SM_MODEL_DIR"], f"{os.environ['RANK']}.early"), "w")
early.write("early")
import numpy, torch
class Last:
    def __del__(self):
        os.write(1, b"deleted\\n")
last = Last()
packed = gzip.open(os.path.join(os.environ["SM_MODEL_DIR"], f"{os.environ['RANK']}.gz"), "wt")
packed.write("packed")
atexit.register(lambda: print("called", torch.nn.Linear.__name__, flush=True))
unfinished = open(os.path.join(os.environ["SM_MODEL_DIR"], os.environ["RANK"]), "w")
unfinished.write("saved")
ctypes.CDLL(None).printf(b"of C\\n")
def late():
    time.sleep(0.2)
    import torch.fft
    print("a thread", flush=True)
threading.Thread(target=late).start()
def refer():
    return early, last, packed
sys.exit(0)
"""


@LAUNCHERS
def test_nothing_of_the_script_is_lost_at_the_end_of_a_rank(tree: Tree, run: Run, launcher: dict[str, Any]) -> None:
    """A forked rank leaves the objects of imported packages as they are, and ends without their exit handlers."""
    tree.script(ENDS)
    tree.hyperparameters(**launcher)
    ended = [run(SHOAL_STANDBY=value) for value in ("1", "0")]
    for done in ended:
        assert done.code == 0, done
        for text, number in {"deleted": 2, "called Linear": 2, "of C": 2, "a thread": 2}.items():
            assert done.out.count(text) == number, (text, done)
        assert "ignored" not in done.err
        for rank in ("0", "1"):
            directory = tree.base / "model"
            assert [(directory / f"{rank}{end}").read_text() for end in ("", ".early")] == ["saved", "early"]
            assert gzip.decompress((directory / f"{rank}.gz").read_bytes()) == b"packed"


COMMAND = "import os\nprint('forked', 'sidecars.standby' in open('/proc/self/cmdline').read(), flush=True)\n"


@pytest.mark.parametrize(
    ("options", "forked"),
    [("-x MY_TEST=1", True), ("-x OMP_NUM_THREADS=3", False), ("-x LD_LIBRARY_PATH=/opt/more", False)],
)
def test_a_variable_that_imports_read_is_never_late(tree: Tree, run: Run, options: str, forked: bool) -> None:
    """mpirun sets it after the standby has imported the frameworks: then each rank imports them itself."""
    tree.script(COMMAND)
    tree.hyperparameters(**MPI, sagemaker_mpi_custom_mpi_options=options)
    done = run()
    assert done.out.count(f"forked {forked}") == 2, done


def test_the_only_rank_of_mpirun_is_not_forked(tree: Tree, run: Run) -> None:
    tree.script(COMMAND)
    tree.hyperparameters(**{**MPI, "sagemaker_mpi_num_of_processes_per_host": 1})
    assert "forked False" in run().out


@pytest.mark.parametrize(
    ("target", "number", "expected"),
    [("os.getpid()", "SIGSEGV", 139), ("os.getpid()", "SIGKILL", 137), ("os.getppid()", "SIGKILL", 137)],
    ids=["a rank crashes", "a rank is killed", "its parent is killed"],
)
def test_the_end_of_a_forked_rank_is_that_of_the_job(
    tree: Tree, run: Run, target: str, number: str, expected: int
) -> None:
    """The parent is the process between the standby and a rank of mpirun."""
    tree.script(
        "import os, signal, time\n"
        f"if os.environ['RANK'] == '1':\n    os.kill({target}, signal.{number})\n"
        "time.sleep(50)\n"
    )
    tree.hyperparameters(**MPI)
    done = run()
    assert (done.code, "rank 1" in tree.failure) == (expected, True), done


TELL = """\
import glob, os, signal, sys, time
def end(*_):
    print("told", os.environ["RANK"], flush=True)
    sys.exit(0)
signal.signal(signal.SIGUSR2, end)
program = os.path.dirname(os.readlink("/proc/self/fd/1")) + "/hand_over.py"  # in the run directory of this job
for path in glob.glob("/proc/[0-9]*/cmdline"):
    try:
        pid = int(path.split("/")[2])
        own = f"OMPI_COMM_WORLD_RANK={os.environ['RANK']}" in open(f"/proc/{pid}/environ").read().split(chr(0))
        if own and open(path).read().split(chr(0))[2:3] == [program]:
            os.kill(pid, signal.SIGUSR2)
    except OSError:
        continue
time.sleep(50)
"""


def test_signals_reach_a_forked_rank(tree: Tree, run: Run) -> None:
    """Of processes that signal what mpirun has started: the program that has handed the rank over."""
    tree.script(TELL)
    tree.hyperparameters(**MPI)
    done = run()
    assert (done.code, {*re.findall(r"told \d", done.out)}) == (0, {"told 0", "told 1"}), done
