"""The commands themselves: help, old names, names of images that expensive commands need, and `cache prune`."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from shoal import cli
from shoal.builds import base_image
from shoal.commands import common, deploy, setup
from shoal.matrix.project import Project
from shoal.matrix.spec import BuildSpec

for _module in cli.MODULES:
    importlib.import_module(f"shoal.commands.{_module}")


def run(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(common.app, list(words))
    return result.exit_code, result.stdout, result.stderr + str(result.exception or "")


def test_every_command_has_a_panel_an_example_and_a_page(project: Project) -> None:
    commands = common.app.registered_commands
    panels = {command.rich_help_panel for command in commands}
    assert panels == {common.EVERY_DAY, common.BUILD, common.RUN, common.INSPECT, common.SET_UP}
    for command in [*commands, *deploy.deploy.registered_commands, *setup.cache.registered_commands]:
        assert command.callback
        assert "Example: shoal " in str(inspect.getdoc(command.callback)), command.name
        page = str(command.epilog).removeprefix("More: ")
        assert (project.root / page).is_file(), command.name


def test_help_lists_the_ten_commands_of_every_day_first() -> None:
    listed = re.findall(r"^│ ([a-z]+) ", run("--help")[1], re.MULTILINE)
    assert listed[:10] == ["run", "build", "list", "ps", "logs", "stop", "shell", "report", "new", "doctor"]


def test_a_dry_build_prints_the_decisions(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project.root)
    monkeypatch.setattr(
        "shoal.builds.plan.plan_builds", lambda *given: [SimpleNamespace(decision=image.tag) for image in given[-1]]
    )
    code, out, err = run("build", "--dry-run", "--all", "--json")
    assert (code, err) == (0, "")
    assert len(json.loads(out)) == len(common.open_project()[1].images)


@pytest.mark.parametrize("command", [["build"], ["build", "--dry-run"], ["push", "--to", "registry.example.org"]])
def test_expensive_commands_need_names_or_all(
    project: Project, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.chdir(project.root)
    words = " ".join(command[: None if command[0] == "push" else 1])
    assert f"No image is named. Fix: name images, such as shoal {words} pytorch, or add --all" in run(*command)[2]
    assert "pytorch and --all: contradict each other. Fix: leave out one" in run(*command, "pytorch", "--all")[2]


def test_prune_keeps_base_images_in_use(
    project: Project, matrix: BuildSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project.root)
    monkeypatch.setattr(Project, "cache", property(lambda _: tmp_path))
    used = base_image.archive_path(tmp_path, matrix.systems()[0])
    stale = [tmp_path / name for name in ("base-buster-0.tar", "logs/a.log", "installed/b.tar")]
    other = tmp_path / "unchanged.json"
    for path in (used, other, *stale):
        path.parent.mkdir(exist_ok=True)
        path.write_text("abc")
    code, out, _ = run("cache", "prune", "--json")
    assert code == 0
    assert {file["path"]: file["bytes"] for file in json.loads(out)} == {str(path): 3 for path in stale}
    assert [path.exists() for path in (used, other, *stale)] == [True, True, False, False, False]
    assert "1 files removed" in run("cache", "prune", "--all")[1]
    assert [path.exists() for path in (used, other)] == [False, True]


def test_all_modules_of_commands_are_loaded() -> None:
    """The tests above see only commands of modules that something imports."""
    folder = Path(str(common.__file__)).parent
    assert isinstance(common.app, typer.Typer)
    defining = {path.stem for path in folder.glob("*.py") if ".command(" in path.read_text()} - {"common"}
    assert defining == set(cli.MODULES)
