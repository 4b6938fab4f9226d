"""What the tests of several rooms share."""

from __future__ import annotations

import gc
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.matrix.project import Project
from shoal.matrix.spec import BuildSpec, load

from .repeats import SEED

pytest_plugins = ["tests.durations"]
PROJECT_URL = "https://example.org/team/shoal"
"""The URL in the metadata of the tests' wheels."""


def pytest_report_header() -> str:
    return f"seed: {SEED} (what is drawn at random draws from it: make soak SEED={SEED})"


def pytest_configure() -> None:
    """Gives the jobs of tests a list of their own. Restores Python's own handler of SIGINT if SIGINT is ignored.

    A shell script starts its background commands with SIGINT ignored, and the commands that the tests start and
    interrupt would inherit that.
    """
    os.environ["XDG_STATE_HOME"] = str(Path(__file__).resolve().parents[1] / ".cache" / "state")
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    """Leaves the tests and their modules out of all collections, which took a quarter of the time to find the tests."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With several workers: long tests and groups first, then all mixed, so that some wait while others compute.

    The tests of one group keep their order.
    """

    def key(item: pytest.Item) -> tuple[bool, bytes]:
        group = item.get_closest_marker("xdist_group")
        name = str(group.args or group.kwargs) if group else item.nodeid
        return not (group or item.get_closest_marker("long")), hashlib.md5(name.encode()).digest()

    if config.getoption("loadgroup", default=False):
        items.sort(key=key)


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Names long values by their argument. Bytes may hold the time, and the workers must agree on tests' names."""
    is_long = (isinstance(val, bytes) and len(val) > 40) or (isinstance(val, str) and len(val) > 200)
    return argname if is_long else None


@pytest.fixture(scope="session")
def project() -> Project:
    """This checkout."""
    return Project(Path(__file__).resolve().parents[1])


@pytest.fixture(scope="session")
def matrix(project: Project) -> BuildSpec:
    return load(project.buildspec)


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory, project: Project) -> Path:
    """A directory with the sdists and wheels of `make wheels`, which twine has checked."""
    output = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "scripts/wheels.py", "--url", PROJECT_URL, "--output", str(output)]
    ended = subprocess.run(command, cwd=project.root, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return output


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root; CI runs as root")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], check=True)
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.fixture(autouse=True, scope="session")
def _groups_work(request: pytest.FixtureRequest) -> None:
    """Fails if this pytest and pytest-xdist ignore `xdist_group`: tests of one group would disturb each other."""
    grouped = [item for item in request.session.items if item.get_closest_marker("xdist_group")]
    if grouped and request.config.getoption("loadgroup", default=False):
        assert "@" in grouped[0].nodeid, "pytest-xdist has put no test into its group: choose versions that fit"
