"""What the tests of the host side share."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.project import Project
from shoal.spec import BuildSpec, load

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def project() -> Project:
    return Project(ROOT)


@pytest.fixture(scope="session")
def matrix(project: Project) -> BuildSpec:
    return load(project.buildspec)
