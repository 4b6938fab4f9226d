"""`shoal run` installs a lock file once, into a copy of the image; from an index in the image, without a network."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from shutil import copy
from typing import NamedTuple

import docker
import pytest

from shoal.jobs.locked_image import REPOSITORY

from ..tested_images import CLONE
from ..toolkit.test_install import wheel
from .test_recipes import built

pytestmark = pytest.mark.xdist_group("recipes")

DOCKERFILE = """\
ARG BASE
FROM ${BASE}
COPY --chmod=0755 uv /opt/venv/bin/uv
COPY simple /simple
"""
SCRIPT = """
import os, needed
print("it says", needed.NAME, os.path.exists("/run/machine/pip.conf"), os.environ.get("PIP_CONFIG_FILE"))
with open(needed.__file__, "w") as file:
    file.write("NAME = 'changed'")
"""


class Project(NamedTuple):
    """A script with a lock file, and this user's state."""

    image: str
    directory: Path

    def lock(self, name: str, digest: str) -> None:
        text = f"{name}==1.0 --hash=sha256:{digest}\n"
        (self.directory / "code" / "requirements.txt").write_text(text)

    def run(self) -> tuple[int, str]:
        shoal = str(Path(sys.executable).with_name("shoal"))
        command = [shoal, "run", self.image, "code/train.py", "--plain", "-e", "PIP_INDEX_URL=file:///simple"]
        environment = {**os.environ, "XDG_STATE_HOME": str(self.directory / "state")}
        done = subprocess.run(command, cwd=self.directory, env=environment, capture_output=True, text=True, timeout=300)
        return done.returncode, done.stdout + done.stderr

    def lists(self) -> list[Path]:
        return [path for path in self.directory.glob("state/shoal/locks/*/*") if path.is_file()]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The context of an image with an index and uv."""
    directory = tmp_path_factory.mktemp("image")
    for name in ("needed", "further"):
        place = directory / "simple" / name
        place.mkdir(parents=True)
        path = wheel(place, name)
        (place / "index.html").write_text(f'<a href="{path.name}">{path.name}</a>')
    copy(Path(sys.executable).with_name("uv"), directory / "uv")
    (directory / "Dockerfile").write_text(DOCKERFILE)
    return directory


@pytest.fixture(scope="module")
def image(wheels: Path, pytorch: str) -> Iterator[str]:
    with built(f"locks-by-test-{CLONE}:latest", wheels, BASE=pytorch) as tag:
        yield tag


@pytest.fixture
def locked(client: docker.DockerClient, image: str, tmp_path: Path) -> Iterator[Project]:
    before = {each.id for each in client.images.list(REPOSITORY)}
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text(SCRIPT)
    yield Project(image, tmp_path)
    for each in client.images.list(REPOSITORY):
        if each.id not in before and f" {image}" in "".join(path.read_text() for path in tmp_path.rglob("locks/*/*")):
            client.images.remove(str(each.id), force=True)


def digest_of(wheels: Path, name: str) -> str:
    return hashlib.sha256(next((wheels / "simple" / name).glob("*.whl")).read_bytes()).hexdigest()


def test_a_lock_is_installed_once_and_no_job_can_change_it(
    client: docker.DockerClient, locked: Project, wheels: Path
) -> None:
    locked.lock("needed", digest_of(wheels, "needed"))
    code, first = locked.run()
    assert code == 0, first
    assert "installing requirements.txt into a copy of" in first
    assert "it says needed False None" in first
    (listed,) = locked.lists()
    made = client.images.get(listed.read_text().split('"')[3])
    base = client.images.get(locked.image)
    for key in ("Env", "Cmd", "Entrypoint", "User", "WorkingDir", "Volumes"):
        assert (made.attrs["Config"].get(key) or None) == (base.attrs["Config"].get(key) or None), key

    code, second = locked.run()
    assert code == 0, second
    assert "installing" not in second
    assert "requirements.txt: its packages are installed already" in second
    assert "it says needed False None" in second

    listed.parent.chmod(0o777)  # somebody else could have written the list
    assert "installing" in locked.run()[1]
    listed.parent.chmod(0o700)

    locked.lock("further", digest_of(wheels, "further"))
    code, other = locked.run()
    assert "No module named 'needed'" in other
    assert [path.name == listed.name for path in locked.lists()] == [False], "the earlier lock's is removed"
    assert code == 1


def test_a_lock_that_cannot_be_installed_starts_no_job(locked: Project) -> None:
    locked.lock("needed", "0" * 64)
    code, output = locked.run()
    assert code != 0
    assert "Hash mismatch for `needed==1.0`" in output
    assert "it says" not in output
    assert locked.lists() == []
