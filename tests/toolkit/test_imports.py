"""What changes in the frameworks that a rank imports, with the .pth file that Python reads at its start."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOOLKIT = Path(__file__).resolve().parents[2] / "toolkit"
REHEARSAL = TOOLKIT.parent / "rehearsal"
SAY = "import gc; print(__name__, gc.isenabled())\n"
STATE = "import gc; print(gc.isenabled(), gc.get_freeze_count() > 1000); "


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A directory as of an image: with both .pth files, and a `site` that reads them."""
    shutil.copy(TOOLKIT / "shoal-toolkit.pth", tmp_path)
    shutil.copy(REHEARSAL / "shoal-rehearsal.pth", tmp_path)
    (tmp_path / "sitecustomize.py").write_text(f"import site; site.addsitedir({str(tmp_path)!r})\n")
    return tmp_path


@pytest.fixture
def site(packages: Path) -> Path:
    """The same, with a `torch`."""
    torch = packages / "torch"
    torch.mkdir()
    (torch / "__init__.py").write_text(f"{SAY}objects = [[] for _ in range(5000)]\n")
    (torch / "_dynamo.py").write_text(SAY)
    (torch / "nn.py").write_text(SAY)
    (packages / "tensorflow.py").write_text(f"{SAY}import torch\n")
    return packages


def run(site: Path, program: str, **variables: str | None) -> list[str]:
    """Runs a program as a rank, and returns the lines that it prints. None: the variable is not set."""
    path = os.pathsep.join(map(str, (site, TOOLKIT, REHEARSAL)))
    given = {"PATH": os.environ["PATH"], "PYTHONPATH": path, "SM_CURRENT_HOST": "algo-1", **variables}
    environ = {name: value for name, value in given.items() if value is not None}
    ended = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def test_a_framework_is_imported_without_collections(site: Path) -> None:
    program = f"import torch; {STATE} import torch._dynamo, torch.nn; {STATE}"
    assert run(site, program) == ["torch False", "True True", "torch._dynamo False", "torch.nn True", "True True"]


def test_a_framework_that_imports_another_ends_without_collections_too(site: Path) -> None:
    """The end of the inner import does not turn the collector on."""
    assert run(site, f"import tensorflow; {STATE}") == ["tensorflow False", "torch False", "True True"]


@pytest.mark.parametrize("variables", [{"SHOAL_FAST_IMPORTS": "0"}, {"SM_CURRENT_HOST": None}])
def test_without_fast_imports_nothing_changes(site: Path, variables: dict[str, str | None]) -> None:
    assert run(site, f"import torch; {STATE}", **variables) == ["torch True", "True False"]


def test_a_disabled_garbage_collection_stays_disabled(site: Path) -> None:
    assert run(site, f"import gc; gc.disable(); import torch; {STATE}") == ["torch False", "False False"]


def test_a_failed_import_and_its_repetition(site: Path) -> None:
    (site / "torch" / "__init__.py").write_text("import gc; assert not gc.isenabled(); 1 / 0")
    program = f"""\
for _ in range(2):
    try:
        import torch
    except ZeroDivisionError:
        {STATE}"""
    assert run(site, program) == ["True False"] * 2


def test_looking_for_a_framework_changes_nothing(site: Path) -> None:
    program = f"from importlib.util import find_spec; print(find_spec('torch').name, find_spec('jax')); {STATE}"
    assert run(site, program) == ["torch None", "True False"]


def test_a_rehearsal_may_extend_the_framework_too(site: Path) -> None:
    """Its finder and ours ask each other; it extends the framework after the import."""
    program = f"""\
from shoal_rehearsal.import_hooks import call_after_import
call_after_import("torch", lambda: print("rehearsed"))
import torch; {STATE}"""
    assert sorted(run(site, program)) == ["True True", "rehearsed", "torch False"]
    swapped = program.replace(
        "\nimport torch;", "\nimport sys; sys.meta_path.insert(0, sys.meta_path.pop(1))\nimport torch;"
    )
    assert sorted(run(site, swapped)) == ["True True", "rehearsed", "torch False"]


def test_a_model_may_outlive_the_process_group(packages: Path) -> None:
    """As in many scripts. Plain torch hangs after some repetitions."""
    program = """\
import faulthandler
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def train():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    dist.all_reduce(torch.zeros(1))
    dist.destroy_process_group()

faulthandler.dump_traceback_later(100, exit=True)
for _ in range(300):
    train()"""
    assert run(packages, program, OMP_NUM_THREADS="1") == []


@pytest.mark.parametrize("end", ["", "torch.distributed.distributed_c10d.destroy_process_group()"])
def test_threads_are_idle_before_a_group_or_python_ends(site: Path, end: str) -> None:
    """A thread of gloo that asks for Python's lock later hangs or aborts plain torch (exit code 134), but not always.

    A thread that computes without that lock stands for it.
    """
    distributed = site / "torch" / "distributed"
    distributed.mkdir()
    (distributed / "__init__.py").touch()
    (distributed / "distributed_c10d.py").write_text("""\
import threading, types, hashlib
_world = types.SimpleNamespace(pg_map={"a group": ("gloo", None)})
thread = threading.Thread(target=hashlib.sha256, args=[bytes(50_000_000)], daemon=True)
def destroy_process_group():
    print("it computes:", thread.is_alive())
    _world.pg_map.clear()
""")
    program = f"""\
import atexit
atexit.register(lambda: print("it computes:", torch.distributed.distributed_c10d.thread.is_alive()))  # runs last
import torch.distributed.distributed_c10d
torch.distributed.distributed_c10d.thread.start()
{end}"""
    assert run(site, program)[1:] == ["it computes: False"] * (2 if end else 1)
