"""What the tests of several rooms share."""

from __future__ import annotations

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
