"""The command itself: exit codes and words of each kind of failure."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal import engine
from shoal.errors import DiskError
from shoal.project import Project

SHOAL = Path(sys.executable).with_name("shoal")
NO_ENGINE = {"DOCKER_HOST": "unix:///nonexistent/docker.sock"}


def shoal(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "COLUMNS": "200", **environment}
    return subprocess.run([SHOAL, *arguments], cwd=cwd, env=env, capture_output=True, text=True, check=False)


def test_list_names_the_images_without_an_engine(project: Project) -> None:
    result = shoal("list", cwd=project.root, **NO_ENGINE)
    assert result.returncode == 0
    assert "pytorch-training:2.0.1-gpu-py311-cu117-debian12" in result.stdout


def test_an_unknown_image_exits_2_with_the_choices(project: Project) -> None:
    result = shoal("build", "pytroch", cwd=project.root)
    assert result.returncode == 2
    assert "Did you mean 'pytorch'?" in result.stderr
    assert "tensorflow" in result.stderr


def test_an_engine_that_does_not_answer_exits_4_with_what_to_do(project: Project) -> None:
    result = shoal("build", "pytorch", cwd=project.root, **NO_ENGINE)
    assert result.returncode == 4
    assert "no Docker Engine answers at unix:///nonexistent/docker.sock" in result.stderr
    assert "make train ENGINE=none" in result.stderr
    assert "Traceback" not in result.stderr


def test_outside_a_checkout_exits_2(tmp_path: Path) -> None:
    result = shoal("list", cwd=tmp_path)
    assert result.returncode == 2
    assert "no buildspec.yml" in result.stderr


def test_a_malformed_buildspec_exits_3(tmp_path: Path) -> None:
    (tmp_path / "buildspec.yml").write_text("images: []\n")
    result = shoal("list", cwd=tmp_path)
    assert result.returncode == 3
    assert f"{tmp_path / 'buildspec.yml'}:1: mpi: required, but missing" in result.stderr


def test_a_stale_dockerfile_fails_the_check(project: Project, tmp_path: Path) -> None:
    shutil.copy(project.buildspec, tmp_path)
    shutil.copytree(project.templates, tmp_path / "dockerfiles")
    assert shoal("render", "--check", cwd=tmp_path).returncode == 0
    with (tmp_path / "dockerfiles" / "base.j2").open("a") as file:
        file.write("# changed\n")
    result = shoal("render", "--check", cwd=tmp_path)
    assert result.returncode == 3
    assert "Run: shoal render" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--channel", "training"], "--channel training: expected NAME=VALUE"),
        (["--distribution", "{mpi}"], "--distribution: not JSON"),
        (["--distribution", "[]"], "--distribution: expected a JSON object"),
        (["--hyperparameter", "a=1", "--hyperparameter", "a=2"], "--hyperparameter a: given twice"),
    ],
)
def test_wrong_options_of_run_exit_2(project: Project, arguments: list[str], words: str) -> None:
    base = ["run", "pytorch", "--source", "examples/digits", "--entry-point", "train.py"]
    result = shoal(*base, *arguments, cwd=project.root, **NO_ENGINE)
    assert result.returncode == 2
    assert words in result.stderr


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root; CI runs as root")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], check=True)
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_too_little_disk_is_told_with_both_numbers(small_disk: Path) -> None:
    with pytest.raises(DiskError, match=r"0\.0 GiB free, and this build needs 16 GiB"):
        engine.check_free(small_disk, 16)
    engine.check_free(small_disk, 0)


def test_the_engine_script_refuses_to_replace_a_named_engine(project: Project) -> None:
    command = [project.root / "scripts" / "engine.sh"]
    env = {**os.environ, **NO_ENGINE}
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "DOCKER_HOST" in result.stderr
    assert "make train ENGINE=none" in result.stderr


def test_make_refuses_an_unknown_framework(project: Project) -> None:
    command = ["make", "--no-print-directory", "image", "FRAMEWORK=tensorflwo"]
    result = subprocess.run(command, cwd=project.root, capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert "Did you mean 'tensorflow'?" in result.stderr
