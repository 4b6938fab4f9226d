"""`shoal estimate --json` prints only its document on standard output. The library's `plan` is faked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.fake_docker import FakeDocker

from shoal import docker_client
from shoal.commands import estimate, script
from shoal.errors import UsageError


def print_plan(*, stream: bool = False, follow: bool = False, stdout: bool = True, stderr: bool = True) -> Any:
    """Return what a container has printed."""
    text = b"a warning\n" * stderr + b'{"plans": []}\n' * stdout
    return iter([text]) if stream else text


def test_a_model_is_planned_in_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model is the user's code, and may do more than describe itself: it gets no network, and cannot write."""
    (tmp_path / "model.py").write_text("")
    client = FakeDocker(logs=print_plan, wait=lambda: {"StatusCode": 1})
    monkeypatch.setattr(docker_client, "connect", lambda: client)
    with pytest.raises(typer.Exit) as ended:
        estimate.plan_model("a:1", f"{tmp_path}/model.py:make", ["--devices", "2"], as_json=True)
    printed = capsys.readouterr()
    assert (ended.value.exit_code, json.loads(printed.out), printed.err) == (1, {"plans": []}, "a warning\n")
    (made,) = client.made
    assert made.image == "a:1"
    assert made.command == ["-m", "smdistributed.modelparallel", "plan", "model.py:make", "--devices", "2", "--json"]
    assert (made.settings["entrypoint"], made.settings["network_mode"]) == (["python"], "none")
    (mount,) = made.settings["mounts"]
    assert (mount["Source"], mount["Target"], mount["ReadOnly"]) == (str(tmp_path), made.settings["working_dir"], True)
    with pytest.raises(typer.Exit):
        estimate.plan_model("a:1", f"{tmp_path}/model.py:make")
    assert "a warning" in capsys.readouterr().out
    assert "--json" not in client.made[-1].command


@pytest.mark.parametrize("factory", ["{}/model.py", "{}/other.py:make", "{}:make"])
def test_a_factory_without_a_file_is_an_error(tmp_path: Path, factory: str) -> None:
    (tmp_path / "model.py").write_text("")
    with pytest.raises(UsageError, match=r"expected FILE\.py:NAME"):
        estimate.plan_model("a:1", factory.format(tmp_path))


def test_with_this_machines_python(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(estimate, "_COMMAND", ("-c", "import sys; print(sys.argv[1:])"))
    with pytest.raises(typer.Exit):
        estimate.plan_model("pytorch", "m.py:f", engine=script.RunEngine.none, as_json=True)
    assert capfd.readouterr().out == "['m.py:f', '--json']\n"
