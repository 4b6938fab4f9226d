"""`shoal bundle`: what it tells of what it has collected; the engine, apt and pip are not asked here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal import engine
from shoal.build import base, bundle
from shoal.commands import building
from shoal.errors import UsageError
from shoal.matrix.project import Project
from shoal.matrix.spec import BuildSpec
from shoal.sources import context


def write_bundle(directory: Path, *suites: str) -> Path:
    for suite in suites:
        (directory / suite / "debs").mkdir(parents=True)
        (directory / suite / "debs" / "Packages").touch()
        (directory / suite / "debs" / f"python3_{suite}.deb").touch()
        (directory / suite / "base.tar").touch()
    (directory / "wheels").mkdir()
    return directory


def test_a_build_is_given_the_packages_of_its_suite(project: Project, matrix: BuildSpec, tmp_path: Path) -> None:
    host = bundle.read(write_bundle(tmp_path, "bookworm", "trixie"))
    own = context.own_wheels(project)
    for image in (matrix.select("pytorch-*-cu130-debian12"), matrix.select("pytorch-*-cu130-debian13")):
        sources = context.gather(project, matrix, image, own, buildkit=True)
        files = context.files(sources, matrix, image, host)
        names = {name for name in files if name.startswith("machine/debs/")}
        assert names == {"machine/debs/Packages", f"machine/debs/python3_{image.system.suite}.deb"}
        assert files["machine/sources.list"] == b"deb [trusted=yes] file:/run/machine/debs ./\n"


def test_a_bundle_that_lacks_a_system_is_told(
    matrix: BuildSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "find", lambda *_: base.BaseImage("x", "sha256:1", "x"))
    directory = write_bundle(tmp_path, "bookworm")
    client: Any = None
    bundle.load_bases(client, directory, matrix.systems()[:1])
    with pytest.raises(UsageError, match=r"it is for Debian bookworm, not for trixie\. Add the images .*shoal bundle"):
        bundle.load_bases(client, directory, matrix.systems())
    with pytest.raises(UsageError, match="not a bundle"):
        bundle.read(directory / "wheels")


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
