"""What is installed before the launch: on every host, before any script, and stoppable."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from . import loopback
from .conftest import TRAIN, Run, Tree, clean_environment
from .netns import UNAVAILABLE, Host, running, two_hosts

TOUCH = "import os, pathlib; pathlib.Path(os.environ['SM_MODEL_DIR'], 'ran').touch()"


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    with two_hosts(tmp_path) as made:
        yield made


def requirements(tree: Tree, text: str) -> None:
    (tree.code / "requirements.txt").write_text(text)


def test_an_install_that_fails_ends_the_job_with_pips_reason(tree: Tree, run: Run) -> None:
    tree.script(TOUCH)
    requirements(tree, "--no-index\nno-such-package\n")
    assert run(SAGEMAKER_PROGRAM="train.py").code == 1
    assert tree.failure.startswith("ERROR: Could not find a version that satisfies the requirement no-such-package")
    assert "install -r requirements.txt" in tree.failure
    assert not (tree.base / "model" / "ran").exists()


@pytest.mark.skipif(bool(UNAVAILABLE), reason=UNAVAILABLE)
@pytest.mark.parametrize(("broken", "mpi"), [(0, False), (1, True)])
def test_an_install_that_fails_on_one_host_starts_nothing_on_any(hosts: list[Host], broken: int, mpi: bool) -> None:
    for host in hosts:
        host.tree.script(TOUCH)
        host.tree.hyperparameters(sagemaker_program="train.py", sagemaker_mpi_enabled=mpi)
    requirements(hosts[broken].tree, "--no-index\nno-such-package\n")
    processes = [host.start() for host in hosts]
    with running(*processes):
        done = [host.finished(process) for host, process in zip(hosts, processes, strict=True)]
    assert [ended.code for ended in done] == [1, 1], done
    for host in hosts:
        assert "no-such-package" in host.tree.failure
        assert not (host.tree.base / "model" / "ran").exists()


def test_a_stop_while_pip_waits_for_its_index(tree: Tree, tmp_path: Path) -> None:
    """The index accepts the connection and says nothing."""
    tree.script(TOUCH)
    with socket.create_server(("127.0.0.1", 0)) as index, (tmp_path / "log").open("wb") as log:
        requirements(tree, f"--index-url http://127.0.0.1:{index.getsockname()[1]}/simple\nsome-package\n")
        environment = clean_environment(SAGEMAKER_BASE_DIR=str(tree.base), SAGEMAKER_PROGRAM="train.py")
        job = subprocess.Popen(TRAIN, env=environment, stdout=log, stderr=log)
        index.settimeout(30)
        connection, _ = index.accept()
        with connection:
            began = time.monotonic()
            job.send_signal(signal.SIGTERM)
            assert job.wait(timeout=20) == 143
    assert time.monotonic() - began < 12  # pip itself gives up after 15 s, and then tries again
    assert "was stopped" in tree.failure
    assert not (tree.base / "model" / "ran").exists()


@pytest.mark.parametrize("late", [0, 1])
def test_a_setup_that_does_not_end_is_killed_and_named_on_every_host(tmp_path: Path, late: int) -> None:
    """The index accepts the connection and says nothing, as above."""
    trees = loopback.two_trees(tmp_path)
    for tree in trees:
        tree.script(TOUCH)
    with socket.create_server(("127.0.0.1", 0)) as index:
        requirements(trees[late], f"--index-url http://127.0.0.1:{index.getsockname()[1]}/simple\nsome-package\n")
        with loopback.started(trees, SHOAL_SETUP_TIMEOUT="2") as trains:
            assert [train.wait(60) for train in trains] == [1, 1]
    for tree in trees:
        assert (
            "The set-up before the launch did not end within 2 s, and was killed. SHOAL_SETUP_TIMEOUT" in tree.failure
        )
        assert "install -r requirements.txt" in tree.failure
        assert not (tree.base / "model" / "ran").exists()
