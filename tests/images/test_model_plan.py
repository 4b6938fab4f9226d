"""`shoal estimate --json` prints only its document on standard output. The library's `plan` is faked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from shoal import docker_client
from shoal.commands import jobs
from shoal.jobs import model_plan


class Container:
    """A container that has ended, with two output streams."""

    labels: tuple[str, ...] = ()

    def __init__(self, command: list[str]) -> None:
        self.command = command

    def start(self) -> None:
        pass

    def logs(self, *, stream: bool = False, stdout: bool = True, stderr: bool = True, **_: Any) -> Any:
        text = b"a warning\n" * stderr + b'{"plans": []}\n' * stdout
        return iter([text]) if stream else text

    def wait(self) -> dict[str, int]:
        return {"StatusCode": 1}


class Engine:
    """Docker with such containers."""

    def __init__(self) -> None:
        self.containers = self.networks = self
        self.commands: list[list[str]] = []

    def create(self, _: str, command: list[str], **__: Any) -> Container:
        self.commands.append(command)
        return Container(command)

    def list(self, **_: Any) -> Iterator[None]:
        return iter(())


def test_in_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text("")
    here = Engine()
    monkeypatch.setattr(docker_client, "connect", lambda: here)
    with pytest.raises(typer.Exit) as ended:
        jobs.plan_model("a:1", f"{tmp_path}/model.py:make", ["--devices", "2"], as_json=True)
    told = capsys.readouterr()
    assert (ended.value.exit_code, json.loads(told.out), told.err) == (1, {"plans": []}, "a warning\n")
    assert here.commands == [
        ["-m", "smdistributed.modelparallel", "plan", "model.py:make", "--devices", "2", "--json"],
    ]
    with pytest.raises(typer.Exit):
        jobs.plan_model("a:1", f"{tmp_path}/model.py:make")
    assert "a warning" in capsys.readouterr().out
    assert "--json" not in here.commands[-1]


def test_with_this_machines_python(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(model_plan, "_COMMAND", ("-c", "import sys; print(sys.argv[1:])"))
    with pytest.raises(typer.Exit):
        jobs.plan_model("pytorch", "m.py:f", engine=jobs.Engine.none, as_json=True)
    assert capfd.readouterr().out == "['m.py:f', '--json']\n"
