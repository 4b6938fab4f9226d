"""`shoal bundle`: what it tells of what it has collected; the engine, apt and pip are not asked here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal import engine
from shoal.build import base, bundle
from shoal.commands import building
from shoal.matrix.project import Project


def test_json_has_what_was_collected(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine, "connect", lambda: None)
    monkeypatch.setattr(base, "ensure", lambda *_: base.BaseImage("debian:bookworm-slim", "sha256:1", "debian"))
    monkeypatch.setattr(bundle, "_save", lambda _, reference, path: path.write_text(reference))
    monkeypatch.setattr(bundle, "_collect_debs", lambda *_: None)
    monkeypatch.setattr(bundle, "_collect_wheels", lambda *_: None)
    monkeypatch.chdir(project.root)
    building.bundle_images(tmp_path, ["huggingface"], as_json=True)
    told = capsys.readouterr()
    document = json.loads(told.out)
    assert (document["directory"], document["bases"]) == (str(tmp_path), ["debian:bookworm-slim"])
    assert [tag.partition(":")[0] for tag in document["images"]] == ["pytorch-training", "huggingface-training"]
    assert "python3-venv" in document["packages"]
    assert document["bytes"] == len("debian:bookworm-slim")
    assert "wheels: huggingface-training" in told.err
