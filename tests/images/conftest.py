"""Projects for the tests of commands. Their matrix stays the same if a release is added to this checkout's."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from shoal.matrix.project import Project
from shoal.matrix.spec import load
from shoal.sources import lock, render

SMALL = Path(__file__).with_name("data") / "small"


def write_locks(project: Project) -> None:
    """Writes a lock with one made-up file for each layer of each image, and the Dockerfiles."""
    matrix = load(project.buildspec)
    for image in matrix.images:
        directory = project.lock_directory(image)
        directory.mkdir(parents=True, exist_ok=True)
        for layer in lock.layers_of(image):
            header = lock.make_header(project, matrix, image, layer)
            (directory / f"{layer}.txt").write_text(f"{header}\nof-{layer}==1 --hash=sha256:{64 * '0'}\n")
    render.write_files(render.render_all(project, matrix.images))


@pytest.fixture(scope="session")
def small(project: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project with this checkout's templates, and a matrix of its own. No test changes it: see `small_copy`."""
    root = tmp_path_factory.mktemp("small")
    ignored = shutil.ignore_patterns("requirements", "rendered", "versions.yml")
    shutil.copytree(project.templates, root / "dockerfiles", ignore=ignored)
    shutil.copy(SMALL / "buildspec.yml", root)
    shutil.copy(SMALL / "versions.yml", root / "dockerfiles")
    made = Project(root)
    write_locks(made)
    return made


@pytest.fixture
def small_copy(small: Project, tmp_path: Path) -> Project:
    """A copy of `small` in `tmp_path`, for a test that changes it."""
    shutil.copytree(small.root, tmp_path, dirs_exist_ok=True)
    return Project(tmp_path)
