"""`shoal run --watch` in real containers: each edit starts a new job, and nothing of one job reaches the next."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from ..tested_images import PYTORCH_CPU
from ..watching import SECONDS, Watching
from .test_run import command, job_objects, source

__all__ = ["source"]
# A rank 0 that leaves all kinds of state behind, and says what it finds.
SCRIPT = """\
import os, pathlib, subprocess, sys
import torch
places = ["/tmp/left", "/dev/shm/left", "/opt/ml/model/left", "/opt/ml/checkpoints/left", "/opt/ml/code/left"]
places += ["/usr/lib/left", "/opt/ml/output/data/left", os.path.expanduser("~/.left"), torch.__file__ + ".left"]
if os.environ.get("RANK", "0") == "0":
    found = [place for place in places if os.path.exists(place)]
    commands = [path.read_bytes() for path in pathlib.Path("/proc").glob("[0-9]*/cmdline")]
    found += ["a process"] * sum(b"left-process" in each for each in commands)
    found += ["a variable"] * ("LEFT" in os.environ) + ["a module"] * hasattr(torch, "left")
    forked = "sidecars.standby" in pathlib.Path("/proc/self/cmdline").read_text()
    print("ran", VERSION, "forked", forked, "found", found, *sys.argv[1:], flush=True)
    for place in places:
        pathlib.Path(place).write_text("left")
    os.environ["LEFT"] = torch.left = "yes"
    subprocess.Popen(["sh", "-c", "sleep 1000 # left-process"], start_new_session=True)
"""


@pytest.fixture
def watching(source: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Watching]:
    (source / "train.py").write_text(SCRIPT.replace("VERSION", "1"))
    words = command(PYTORCH_CPU, source, tmp_path / "jobs", "--watch", "--plain", *request.param)
    made = Watching(words, source)
    yield made
    made.process.kill()
    made.process.wait()


@pytest.mark.parametrize(
    "watching",
    [("--hosts", "2", "--procs-per-host", "2"), ()],
    ids=["2x2", "1x1"],
    indirect=True,
)
def test_each_edit_runs_in_new_containers(watching: Watching, tmp_path: Path) -> None:
    first = watching.read_until("watching for changes")
    assert re.search(r"ran 1 forked \w+ found \[\]", first), first
    assert "ran 2 forked True found []" in watching.run_again(SCRIPT.replace("VERSION", "2"))
    assert "SyntaxError" in watching.run_again("this is no Python\n")
    assert "No module named 'helper'" in watching.run_again("import helper\n" + SCRIPT.replace("VERSION", "helper.x"))
    again = watching.run_again("x = 3", "helper.py")
    assert "changed: helper.py (new); running train.py again" in again and "ran 3 forked True found []" in again
    assert "ran 4 forked True found []" in watching.run_again("x = 4", "helper.py"), "no module of the project is kept"
    (watching.source / "helper.py").unlink()
    assert "No module named 'helper'" in watching.read_until("watching for changes")

    watching.save("import time\nprint('it sleeps', flush=True)\ntime.sleep(1000)\n")
    watching.read_until("it sleeps")
    watching.process.send_signal(signal.SIGINT)
    assert "stopping; the script has" in watching.read_until("watching for changes")
    watching.process.send_signal(signal.SIGINT)
    assert watching.process.wait(SECONDS) == 128 + signal.SIGINT
    assert job_objects(docker.from_env(), watching.source.name) == set()
    assert len(os.listdir(tmp_path / "jobs")) == 8, "one directory for each run, and none for the next"  # noqa: PTH208
