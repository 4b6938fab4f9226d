"""Every launcher of data/launchers.json: it is planned, starts its ranks, stops, and starts again after a failure."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from shoal.jobs.distribution import convert_distribution, encode_values
from shoal_toolkit.job.launchers import LAUNCHERS, Launcher

from .conftest import TRAIN, Run, Tree, clean_environment

# The last rank dies in the first start. In the second one all ranks save and end when the job is stopped.
SCRIPT = """\
import os, signal, sys, time
RANK, LAST = os.environ.get("RANK", "0"), str(int(os.environ.get("WORLD_SIZE", "1")) - 1)
def save(*_):
    open(f"{os.environ['SM_MODEL_DIR']}/{RANK}", "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("up", RANK, "of", int(LAST) + 1, "restart", os.environ["SHOAL_RESTART"], flush=True)
open("up." + RANK, "w").close()
if os.environ["SHOAL_RESTART"] == "0" and RANK == LAST:
    while not all(os.path.exists(f"up.{rank}") for rank in range(int(LAST) + 1)): time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""


def each_launcher() -> list[object]:
    """The launchers, as parameters; those that mpirun starts need Open MPI."""
    marks = {name: [pytest.mark.mpi] if launcher.ranks == "mpirun" else [] for name, launcher in LAUNCHERS.items()}
    return [pytest.param(launcher, id=name, marks=marks[name]) for name, launcher in LAUNCHERS.items()]


def configure(tree: Tree, launcher: Launcher) -> int:
    """Selects a launcher with two ranks, if it starts several. Returns the number of ranks."""
    tree.script(SCRIPT)
    selected = {launcher.key: True} if launcher.key else {}
    ranks = {"sagemaker_mpi_num_of_processes_per_host": 2} if launcher.has_ranks else {}
    tree.hyperparameters(sagemaker_program="train.py", **selected, **ranks)
    return 2 if launcher.has_ranks else 1


@pytest.mark.parametrize(("name", "key"), [(name, one.key) for one in LAUNCHERS.values() for name in one.distribution])
def test_shoal_writes_the_key_of_the_launcher(name: str, key: str) -> None:
    """An estimator's `distribution` selects the launcher, and none that counts before it."""
    outer, _, library = name.partition(".")
    options = {"enabled": True}
    values = encode_values(convert_distribution({outer: {library: options} if library else options}))
    assert [one.key for one in LAUNCHERS.values() if values.get(one.key) == "true"] == [key]


@pytest.mark.parametrize("launcher", each_launcher())
def test_a_launcher_is_planned_with_its_ranks(tree: Tree, run: Run, launcher: Launcher) -> None:
    ranks = configure(tree, launcher)
    plan = json.loads(run("--explain", "--json").out)
    assert plan["launcher"] == launcher.name
    assert sum(plan["ranks"].values()) == ranks
    assert (plan["command"] != plan["script"]) == launcher.has_ranks
    assert not [note for note in plan["notes"] if "has no effect" in note]


@pytest.mark.parametrize("launcher", each_launcher())
def test_a_launcher_starts_restarts_and_stops_its_ranks(tree: Tree, launcher: Launcher) -> None:
    ranks = configure(tree, launcher)
    environment = clean_environment(SAGEMAKER_BASE_DIR=str(tree.base), SHOAL_MAX_RESTARTS="1")
    with subprocess.Popen(TRAIN, env=environment, stdout=-1, stderr=subprocess.STDOUT, text=True) as job:
        assert job.stdout is not None
        log: list[str] = []
        while len(starts(log)) < 2 * ranks:
            log.append(job.stdout.readline())
            assert log[-1], "".join(log)
        job.send_signal(signal.SIGTERM)
        log += job.stdout
    assert job.returncode == 143, "".join(log)
    expected = [f"up {rank} of {ranks} restart {number}" for number in (0, 1) for rank in range(ranks)]
    assert sorted(starts(log), key=lambda line: line[::-1]) == expected, "".join(log)
    assert sorted(path.name for path in (tree.base / "model").iterdir()) == [str(rank) for rank in range(ranks)]
    (restart,) = tree.report["restarts"]
    assert "signal 9" in restart["reason"]


def starts(log: list[str]) -> list[str]:
    """The lines of ranks that have started, without prefixes."""
    return [line[line.index("up ") :].strip() for line in log if "up " in line and " restart " in line]


def test_the_documentation_lists_every_launcher() -> None:
    text = (Path(__file__).parents[2] / "docs" / "toolkit.md").read_text()
    assert not [launcher.name for launcher in LAUNCHERS.values() if launcher.key not in text]
