"""`shoal new`: the project that it writes, and its errors."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from shoal import scaffold
from shoal.commands import setup
from shoal.errors import UsageError
from shoal.matrix.project import Project
from shoal.matrix.spec import BuildSpec


@pytest.mark.parametrize(("framework", "module"), [("pytorch", "torch"), ("huggingface", "torch"), ("tensorflow",) * 2])
def test_a_project_is_written(tmp_path: Path, matrix: BuildSpec, framework: str, module: str) -> None:
    image = matrix.select(framework)
    written = scaffold.write_project(tmp_path / "my-image", image)
    assert sorted(path.name for path in written) == sorted(path.name for path in (tmp_path / "my-image").iterdir())
    texts = {path.name: path.read_text() for path in written}
    assert texts["Dockerfile"].startswith(f"FROM {image.tag}\n")
    for name in ("train.py", "test_train.py"):
        ast.parse(texts[name])
    assert f"import {module}" in texts["train.py"]
    assert 'IMAGE = "my-image"' in texts["test_train.py"]
    assert "{{" not in "".join(texts.values())


def test_json_has_the_files(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project.root)
    setup.create_project(tmp_path / "mine", as_json=True)
    written = {Path(path) for path in json.loads(capsys.readouterr().out)}
    assert written == set((tmp_path / "mine").iterdir())


@pytest.mark.parametrize("name", ["My-Image", "a b", "-a", "a--b", "ünïcode"])
def test_invalid_image_name_is_an_error(tmp_path: Path, matrix: BuildSpec, name: str) -> None:
    with pytest.raises(UsageError, match="is not a valid image name"):
        scaffold.write_project(tmp_path / name, matrix.select("pytorch"))
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path: Path, matrix: BuildSpec) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.py").write_text("precious")
    with pytest.raises(UsageError, match="exists and is not empty"):
        scaffold.write_project(tmp_path / "mine", matrix.select("pytorch"))
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["train.py"]
    assert (tmp_path / "mine" / "train.py").read_text() == "precious"


def test_existing_file_is_an_error(tmp_path: Path, matrix: BuildSpec) -> None:
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(UsageError, match="mine: is a file; expected a new or empty directory"):
        scaffold.write_project(tmp_path / "mine", matrix.select("pytorch"))
    assert (tmp_path / "mine").read_text() == "precious"


@pytest.mark.parametrize("own", ["", "*.pt\n"])
def test_init_keeps_caches_and_results_out_of_git(tmp_path: Path, own: str) -> None:
    """Logs of jobs may have passwords. A .gitignore that is there stays."""
    if own:
        (tmp_path / ".gitignore").write_text(own)
    written = scaffold.write_definitions(tmp_path)
    assert {path.name for path in written} == {"buildspec.yml", "dockerfiles", *(() if own else (".gitignore",))}
    ignored = (tmp_path / ".gitignore").read_text()
    assert own in ignored
    assert ("jobs/\n" in ignored) != bool(own)
