"""`shoal run` with checkpoints in real containers: interrupts, lost hosts and killed commands lose no checkpoint."""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import signal
import subprocess
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import docker
import pytest

from shoal.docker_client import containers
from shoal.jobs import running, store

from ..images.test_random_kills import SCRIPT, curve
from ..repeats import SEED, times
from ..tested_images import PYTORCH_CPU
from .conftest import ROOT
from .test_run import SHOAL, command, job_objects, source

__all__ = ["source"]
TRAINING = """\
import os, pathlib, sys, time
directory = pathlib.Path("/opt/ml/checkpoints")
host = os.environ["SM_CURRENT_HOST"]
step = len(list(directory.glob(f"{host}-*")))
print("starts at step", step, *sys.argv[1:], flush=True)
(directory / f"{host}-{step}").write_text(host)
if host == "algo-1":
    (directory / f"step-{step}").mkdir()
    (directory / f"step-{step}" / "model").write_text("weights")
    (directory / "last").unlink(missing_ok=True)
    (directory / "last").symlink_to(f"step-{step}")
if step == 0:
    print("saved", flush=True)
    time.sleep(600)
"""
STAND_IN = """\
#!/opt/venv/bin/python3
# A stand-in for `train`: algo-1 waits until algo-2 has started for the second time.
import json, os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(138))
ml = pathlib.Path("/opt/ml")
host = json.loads((ml / "input/config/resourceconfig.json").read_text())["current_host"]
with (ml / "checkpoints" / host).open("a") as log:
    print(os.environ.get("SHOAL_RESTART"), os.environ["SHOAL_MAX_RESTARTS"], file=log)
print("up", flush=True)
other = ml / "checkpoints" / "algo-2"
while not other.exists() or len(other.read_text().splitlines()) < 2:
    time.sleep(0.05)
(ml / "output/success").touch()
"""


@pytest.fixture
def image() -> str:
    return PYTORCH_CPU


def start(arguments: list[str | Path], words: str, count: int) -> subprocess.Popen[str]:
    """Start a command, and wait until it has printed as many lines with these words."""
    process = subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    read_until(process, words, count)
    return process


def read_until(process: subprocess.Popen[str], words: str, count: int) -> None:
    """Read the output of a command until it has printed as many lines with these words."""
    assert process.stdout is not None
    lines = (line for line in process.stdout if words in line)
    assert len(list(itertools.islice(lines, count))) == count


def resume(name: str, output: Path, *options: str) -> subprocess.CompletedProcess[str]:
    arguments: list[str | Path] = [SHOAL, "run", "--resume", name, "--output", output, *options]
    return subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False)


def test_interrupted_job_continues_from_its_checkpoints(
    client: docker.DockerClient, image: str, source: Path, tmp_path: Path
) -> None:
    (source / "train.py").write_text(TRAINING)
    jobs, directory = tmp_path / "jobs", tmp_path / "checkpoints"
    options = ["--hosts", "2", "--hyperparameter", "lr=0.1", "--checkpoints", str(directory)]
    process = start(command(image, source, jobs, *options), "saved", 2)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    (job,) = jobs.iterdir()
    assert process.returncode == 130
    assert f"to continue: shoal run --resume {job.name} --output {jobs}" in output
    assert sorted(path.name for path in directory.iterdir() if path.name[0] != ".") == [
        *("algo-1-0", "algo-2-0", "last", "step-0"),
    ]
    result = resume(job.name, jobs, "--hyperparameter", "epochs=3")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "algo-1 | starts at step 1 --epochs 3 --lr 0.1" in result.stdout
    assert f"checkpoints    {directory}" in result.stdout
    assert (directory / "last").readlink() == Path("step-1")
    assert (directory / "step-0" / "model").read_text() == "weights"
    assert job_objects(client, source.name) == set()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(("lost", "starts"), [("algo-2", ["None 3"]), ("algo-1", ["None 3", "1 3"])])
def test_lost_host_is_started_again(
    client: docker.DockerClient, image: str, source: Path, tmp_path: Path, lost: str, starts: list[str]
) -> None:
    (source / "train.py").touch()
    (source / "train").write_text(STAND_IN)
    (source / "train").chmod(0o755)
    options = ["--hosts", "2", "--max-restarts", "3", "--env", "PATH=/opt/ml/code:/usr/bin:/bin"]
    process = start(command(image, source, tmp_path / "jobs", *options), "up", 2)
    (job,) = (tmp_path / "jobs").iterdir()
    client.containers.get(f"{job.name}-{lost}").kill()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    checkpoints = job / "checkpoints"
    assert (checkpoints / "algo-1").read_text().splitlines() == starts, "a survivor keeps its container"
    assert len((checkpoints / "algo-2").read_text().splitlines()) == 2
    assert "lost" in output
    assert "killed by SIGKILL" in output
    assert job_objects(client, source.name) == set()


@pytest.mark.long
def test_lost_containers_and_networks_change_no_loss(
    client: docker.DockerClient, image: str, source: Path, tmp_path: Path
) -> None:
    """Both ranks train on bit for bit. The other kinds of losses are in tests/images/test_random_kills.py."""
    (source / "train.py").write_text(SCRIPT)
    drawn = random.Random(SEED)

    def run_command(name: str, epochs: int, pause: float) -> list[str | Path]:
        options = ["--hosts", "2", "--max-restarts", "9", "--checkpoints", str(tmp_path / name)]
        for value in (f"epochs={epochs}", f"pause={pause}", "log=/opt/ml/checkpoints"):
            options += ["--hyperparameter", value]
        return command(image, source, tmp_path / "jobs", *options)

    process = start(run_command("killed", 10**6, 0.02), "trains", 2)
    (job,) = (tmp_path / "jobs").iterdir()
    killed = drawn.sample(("algo-1", "algo-2"), times(1, 2))
    ways: list[Callable[[], object]] = [
        *(functools.partial(kill_container, client, f"{job.name}-{host}") for host in killed),
        lambda: client.networks.get(f"shoal-{job.name}").disconnect(f"{job.name}-algo-2"),
    ]
    drawn.shuffle(ways)
    for way in ways:
        time.sleep(drawn.uniform(0, 1))
        way()
        read_until(process, "trains", 2)
    first = client.containers.get(f"{job.name}-algo-1")
    until = time.monotonic() + 120
    while _read_step(first) <= 20 and time.monotonic() < until:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    losses = curve(tmp_path / "killed")
    epochs = max(int(step.partition("/")[2]) for step in losses) // 5 + 1
    whole = subprocess.run(run_command("whole", epochs, 0), cwd=ROOT, capture_output=True, text=True, check=False)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    expected = curve(tmp_path / "whole")
    assert losses == {step: expected[step] for step in losses}
    assert len(losses) > 40
    assert job_objects(client, source.name) == set()


def _read_step(container: docker.models.containers.Container) -> int:
    """The last step in the log of rank 0."""
    output = container.exec_run(["tail", "-n1", "/opt/ml/checkpoints/rank-0"]).output
    assert isinstance(output, bytes)
    words = output.split()
    return int(words[0]) if len(words) == 2 else 0


def kill_container(client: docker.DockerClient, name: str) -> None:
    client.containers.get(name).kill()


def test_checkpoints_of_a_killed_command_are_not_lost(
    client: docker.DockerClient, image: str, source: Path, tmp_path: Path
) -> None:
    (source / "train.py").write_text(TRAINING)
    jobs = tmp_path / "jobs"
    started = subprocess.run(
        command(image, source, jobs, "--detach", "--name", source.name),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert started.returncode == 0, started.stdout + started.stderr
    job = jobs / source.name
    identity = json.loads((job / "request.json").read_text())["identity"]
    follow = start([SHOAL, "logs", "--follow", job], "saved", 1)
    follow.kill()
    follow.wait()
    try:
        inside: list[str | Path] = [SHOAL, "exec", job, "--", "sh", "-c", "cat; pwd >&2; exit 5"]
        result = subprocess.run(inside, input="given\n", capture_output=True, text=True, check=False)
        assert (result.returncode, result.stdout, result.stderr) == (5, "given\n", "/opt/ml/code\n")
        os.kill(json.loads((job / "request.json").read_text())["pid"], signal.SIGKILL)
        running.wait_for_end(job)
        assert store.read_job(job).state == store.LOST
        result = resume(job.name, jobs)
        assert result.returncode == 2
        assert f"its command has been killed. Fix: shoal stop {job.name}," in result.stderr
        stopped = subprocess.run([SHOAL, "stop", job], capture_output=True, text=True, check=False)
        assert f"{job.name}: stopped by SIGTERM (`shoal stop` or kill), exit code 143" in stopped.stdout, (
            stopped.stdout + stopped.stderr
        )
        assert job_objects(client, source.name) == set()
        result = resume(job.name, jobs)
        assert result.returncode == 0, result.stdout + result.stderr
        assert "starts at step 1" in result.stdout
        assert (job / "checkpoints" / "step-0" / "model").read_text() == "weights"
        assert json.loads((job / "request.json").read_text())["exit_code"] == 0
        assert job_objects(client, source.name) == set()
    finally:
        containers.remove_objects(client, identity, volumes=True)


def test_checkpoints_that_cannot_be_collected_stay_in_docker(
    client: docker.DockerClient, image: str, source: Path, tmp_path: Path, small_disk: Path
) -> None:
    """The disk of the directory is full: the old content stays, and the job continues from the volume elsewhere."""
    (source / "train.py").write_text(
        textwrap.dedent("""\
        import pathlib, sys
        large = pathlib.Path("/opt/ml/checkpoints/large")
        if large.exists():
            print("found", large.stat().st_size)
            large.write_bytes(b"small")
        else:
            large.write_bytes(bytes(2 << 20))
            sys.exit(7)
        """)
    )
    jobs, directory = tmp_path / "jobs", small_disk / "checkpoints"
    directory.mkdir()
    (directory / "old").write_text("old")
    arguments = command(image, source, jobs, "--checkpoints", str(directory))
    result = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False)
    (job,) = jobs.iterdir()
    try:
        assert result.returncode == 7, result.stdout + result.stderr  # the script's
        assert "the checkpoints were not collected" in result.stdout
        assert f"They are in the Docker volume shoal-{job.name}" in result.stdout
        assert [path.name for path in directory.iterdir() if path.name[0] != "."] == ["old"]
        result = resume(job.name, jobs)
        assert result.returncode == 0, result.stdout + result.stderr
        assert f"found {2 << 20}" in result.stdout
        assert {path.name: path.read_text() for path in directory.iterdir() if path.name[0] != "."} == {
            "old": "old",
            "large": "small",
        }
        assert job_objects(client, source.name) == set()
    finally:
        containers.remove_objects(client, job.name, volumes=True)
