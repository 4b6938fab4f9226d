"""What the tests of several rooms share."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.matrix.project import Project
from shoal.matrix.spec import BuildSpec, load


@pytest.fixture(scope="session")
def project() -> Project:
    """This checkout."""
    return Project(Path(__file__).resolve().parents[1])


@pytest.fixture(scope="session")
def matrix(project: Project) -> BuildSpec:
    return load(project.buildspec)


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
