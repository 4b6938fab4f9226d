"""The locks of Debian: what is read and written, what a build step compares, the warning about a base without a pin."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import docker.errors
import pytest

from shoal import docker_client
from shoal.builds import base_image, debian_lock
from shoal.builds.base_image import BaseImage
from shoal.builds.debian_lock import DebianLock
from shoal.builds.plan import gather_sources, install_own_packages
from shoal.commands import dependencies
from shoal.errors import BuildError, SpecError
from shoal.matrix.project import Project
from shoal.matrix.spec import EFA, BuildSpec, System
from shoal.sources import record

from ..tested_images import HUGGINGFACE_CPU

PYTHON, LIBC = "python3_3.11.2-1+b1_amd64.deb", "libc6_2.36-9+deb12u13_amd64.deb"
ONE, TWO = (f"SHA256:{digit * 64}" for digit in "12")
UPSTREAM, MADE = "debian:bookworm-slim", "shoal-base:bookworm"
APT = """\
#!/bin/sh
printf '%s\\n' "$*" > {log}
printf '%s\\n' "Reading package lists..." "'http://deb.example/{python}' {python} 26344 {digest}"
"""


def compare(tmp_path: Path, lock: str, digest: str = ONE) -> tuple[int, str]:
    """Run the step's script, of which apt would install one package. Returns its exit code and what it prints."""
    room = tmp_path / "debian"
    room.mkdir()
    text = files("shoal.builds").joinpath("compare.sh").read_text()
    assert text.count("/var/cache/apt/compared") == 1
    (room / "compare.sh").write_text(text.replace("/var/cache/apt/compared", str(tmp_path / "archives")))
    (room / "lock.txt").write_text(lock)
    apt = tmp_path / "apt-get"
    apt.write_text(APT.format(log=tmp_path / "log", python=PYTHON, digest=digest))
    apt.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["sh", str(room / "compare.sh"), "python3", "python3-venv"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.stderr == ""
    return ended.returncode, ended.stdout


def test_a_step_installs_what_the_lock_has(tmp_path: Path) -> None:
    assert compare(tmp_path, f"# made\n{PYTHON} {ONE}\n") == (0, "")
    asked = (tmp_path / "log").read_text()
    assert asked.endswith("python3 python3-venv\n")
    assert "--print-uris" in asked
    assert (tmp_path / "archives" / "partial").is_dir(), "else apt does not list what it has downloaded before"


def test_a_step_reports_what_the_lock_does_not_have(tmp_path: Path) -> None:
    """The end of its name is that of another, which counts for nothing."""
    assert compare(tmp_path, f"lib{PYTHON} {ONE}\n{LIBC} {TWO}\n") == (0, f"shoal: not locked: {PYTHON}\n")


@pytest.mark.parametrize("digest", [TWO, "MD5Sum:0123", ""])
def test_a_step_refuses_another_file_of_a_version_that_the_lock_has(tmp_path: Path, digest: str) -> None:
    code, error = compare(tmp_path, f"{PYTHON} {ONE}\n", digest)
    assert code == 1
    assert error.startswith(
        f"shoal: {PYTHON} has {digest}, but the lock says {ONE}: the mirror has changed a published"
    )
    assert "Fix: use a mirror that you trust" in error


def test_a_step_without_a_lock_compares_nothing(tmp_path: Path) -> None:
    assert compare(tmp_path, "") == (0, "")
    assert not (tmp_path / "log").exists()


def test_a_lock_is_read_as_it_is_written(tmp_path: Path) -> None:
    made = DebianLock({MADE: f"sha256:{'3' * 64}"}, {PYTHON: ONE, LIBC: TWO})
    where = debian_lock.lock_path(Project(tmp_path), "bookworm")
    assert debian_lock.read_lock(Project(tmp_path), "bookworm") == DebianLock({}, {})
    where.parent.mkdir(parents=True)
    where.write_text(made.text("bookworm"))
    assert debian_lock.read_lock(Project(tmp_path), "bookworm") == made
    where.write_text(made.text("bookworm") + "python3=3.11\n")
    with pytest.raises(SpecError, match=r"bookworm.txt:5: expected .*, found 'python3=3.11'\. Fix: make it again"):
        debian_lock.read_lock(Project(tmp_path), "bookworm")


def test_what_is_committed_fits_the_matrix(project: Project, matrix: BuildSpec) -> None:
    """Each release of Debian has a lock, which has all that the images' steps name."""
    suites = {system.suite for system in matrix.systems()}
    with_efa = {f"{system.suite}-{EFA}" for system in matrix.systems() if system.efa}
    assert {path.stem for path in (project.templates / "debian").iterdir()} == suites | with_efa
    for system in matrix.systems():
        lock = debian_lock.read_lock(project, system.suite)
        assert lock.bases
        assert debian_lock.lock_path(project, system.suite).read_text() == lock.text(system.suite)
        names = {name.partition("_")[0] for name in lock.packages}
        images = [image for image in matrix.images if image.system == system]
        assert {name for install in debian_lock.list_installed(project, images) for name in install} <= names


def test_a_new_lock_runs_the_steps_again_that_install_from_debian(project: Project, matrix: BuildSpec) -> None:
    own = install_own_packages(project, "3.11")
    sources = gather_sources(project, matrix, matrix.select("pytorch"), own)
    newer = replace(sources, debian={**sources.debian, "lock.txt": b"newer"})
    plan = record.decide("x", sources.make_record("base@1").labels(), newer.make_record("base@1"))
    assert plan.rebuilt[:2] == ("engine", "system")
    assert plan.reasons == ("debian/lock.txt changed",)


@pytest.fixture
def system(matrix: BuildSpec) -> System:
    return next(system for system in matrix.systems() if system.suite == "bookworm")


def of_layers(*layers: str) -> Any:
    image = SimpleNamespace(attrs={"RootFS": {"Layers": list(layers)}})
    return SimpleNamespace(images=SimpleNamespace(get=lambda _: image))


MINE = BaseImage("shoal-base:bookworm-0123456789ab", "sha256:9", "shoal-base:bookworm-0123456789ab")
PULLED = BaseImage(UPSTREAM, "sha256:9", f"docker.io/library/{UPSTREAM}", f"sha256:{'1' * 64}")


@pytest.mark.parametrize(
    ("found", "bases", "words"),
    [
        (MINE, {MADE: f"sha256:{'1' * 64}"}, ""),
        (PULLED, {UPSTREAM: f"sha256:{'1' * 64}"}, ""),
        (
            MINE,
            {UPSTREAM: f"sha256:{'1' * 64}"},
            r"has no pin in dockerfiles/debian/bookworm.txt\. Fix: .*lock --bases",
        ),
        (PULLED, {MADE: f"sha256:{'1' * 64}"}, r"base: debian:bookworm-slim has no pin"),
        (MINE, {MADE: f"sha256:{'2' * 64}"}, r"is sha256:1{12}, and .* has sha256:2{12}\. Fix: remove the image"),
        (PULLED, {UPSTREAM: f"sha256:{'2' * 64}"}, r"is sha256:1{12}, and .* has sha256:2{12}\. Fix: remove the image"),
        (replace(PULLED, digest=""), {}, "was loaded, not pulled"),
    ],
)
def test_a_base_that_differs_from_the_lock_is_reported(
    system: System, found: BaseImage, bases: dict[str, str], words: str
) -> None:
    locked = DebianLock(bases, {PYTHON: ONE})
    lines = list(debian_lock.describe_differences(of_layers(f"sha256:{'1' * 64}"), found, system, locked))
    assert len(lines) == bool(words)
    assert all(re.search(words, line) for line in lines), lines


def test_a_release_without_a_lock_is_reported(system: System) -> None:
    first, second = debian_lock.describe_differences(of_layers(f"sha256:{'1' * 64}"), MINE, system, DebianLock({}, {}))
    assert first.startswith("Debian bookworm: no package versions in dockerfiles/debian/bookworm.txt. Fix: ")
    assert "has no pin" in second


@pytest.mark.parametrize("pin", ["", f"sha256:{'4' * 64}"])
def test_a_base_is_pulled_by_its_pin(system: System, tmp_path: Path, pin: str) -> None:
    pulled: list[str] = []
    tagged: list[tuple[str, ...]] = []

    def get(tag: str) -> SimpleNamespace:
        if not pulled:
            raise docker.errors.ImageNotFound(tag)
        return SimpleNamespace(id="sha256:9", attrs={"RepoDigests": [f"debian@sha256:{'4' * 64}"]})

    def pull(reference: str) -> SimpleNamespace:
        pulled.append(reference)
        return SimpleNamespace(tag=lambda *words: tagged.append(words))

    client: Any = SimpleNamespace(
        images=SimpleNamespace(get=get, pull=pull), api=SimpleNamespace(images=lambda name, filters: [])
    )
    found = base_image.provide_base(client, system, lambda: pytest.fail("made"), tmp_path, lambda _: None, pin=pin)
    assert (found.reference, found.digest) == (UPSTREAM, f"sha256:{'4' * 64}")
    assert pulled == [f"debian@{pin}" if pin else UPSTREAM]
    assert tagged == ([("debian", "bookworm-slim")] if pin else [])


def test_what_a_mirror_has_now_is_written_or_only_compared(
    project: Project,
    matrix: BuildSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    listed = f"'http://deb.example/{PYTHON}' {PYTHON} 5 {ONE}\n'http://deb.example/{LIBC}' {LIBC} 7 {TWO}\n"
    scripts: list[str] = []

    @contextmanager
    def in_base(
        _: object, reference: str, suite: str, script: str, doing: str, host: object
    ) -> Iterator[SimpleNamespace]:
        scripts.append(script)
        yield SimpleNamespace(logs=lambda **_: f"Reading package lists...\n{listed}".encode())

    copy = Project(tmp_path)
    (tmp_path / "dockerfiles").mkdir()
    for path in project.templates.glob("*.j2"):
        (tmp_path / "dockerfiles" / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(docker_client, "connect", lambda: of_layers(f"sha256:{'3' * 64}"))
    monkeypatch.setattr(base_image, "provide_base", lambda *_, **__: MINE)
    monkeypatch.setattr(debian_lock, "run_in_base", in_base)
    monkeypatch.setattr(dependencies, "open_project", lambda to_write: (copy, matrix))
    where = debian_lock.lock_path(copy, "bookworm")
    with pytest.raises(
        SpecError, match=r"Debian bookworm has other packages or base images now\. Fix: shoal lock --bases"
    ):
        dependencies.lock_images(["pytorch"], bases=True, check=True)
    assert not where.exists()
    dependencies.lock_images(["pytorch"], bases=True)
    assert debian_lock.read_lock(copy, "bookworm") == DebianLock({MADE: f"sha256:{'3' * 64}"}, {PYTHON: ONE, LIBC: TWO})
    assert "--print-uris -o Acquire::ForceHash=SHA256 ca-certificates python3 python3-venv" in scripts[0]
    assert scripts[0].endswith(" gcc libc6-dev")
    capsys.readouterr()
    dependencies.lock_images(["pytorch"], bases=True, check=True, as_json=True)
    (document,) = json.loads(capsys.readouterr().out)
    assert (document["suite"], document["packages"], document["changes"], document["written"]) == (
        "bookworm",
        2,
        [],
        False,
    )
    listed = listed.replace(ONE, "MD5Sum:0123")
    with pytest.raises(BuildError, match="names no packages with their SHA-256"):
        dependencies.lock_images(["pytorch"], bases=True)


def test_a_child_has_a_lock_of_its_own(
    project: Project, matrix: BuildSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package more in a child changes no other image, nor the base image that all share."""
    copy, pulls = Project(tmp_path), []
    shutil.copytree(project.templates, tmp_path / "dockerfiles")
    where = debian_lock.lock_path(copy, "bookworm")
    where.write_text(DebianLock({MADE: f"sha256:{'3' * 64}"}, {PYTHON: ONE}).text("bookworm"))
    before = {path: path.read_text() for path in where.parent.iterdir()}
    parent = debian_lock.comparison_files(copy, "bookworm")
    template = tmp_path / "dockerfiles" / "huggingface.j2"
    old = template.read_text()
    apt = '{% block environment %}{{ install.system_packages(["jq"]) }}{% endblock %}'
    template.write_text('{% extends "child.j2" %}\n' + apt)
    scripts: list[str] = []

    @contextmanager
    def in_base(*arguments: Any) -> Iterator[SimpleNamespace]:
        scripts.append(arguments[3])
        listed = f"'http://deb.example/{PYTHON}' {PYTHON} 5 {ONE}\n'http://deb.example/{LIBC}' {LIBC} 7 {TWO}\n"
        yield SimpleNamespace(logs=lambda **_: listed.encode())

    def provide(*_: Any, newest: bool) -> BaseImage:
        pulls.append(newest)
        return MINE

    monkeypatch.setattr(docker_client, "connect", lambda: of_layers(f"sha256:{'3' * 64}"))
    monkeypatch.setattr(base_image, "provide_base", provide)
    monkeypatch.setattr(debian_lock, "run_in_base", in_base)
    monkeypatch.setattr(dependencies, "open_project", lambda to_write: (copy, matrix))
    dependencies.lock_images([HUGGINGFACE_CPU], bases=True)
    own = debian_lock.lock_path(copy, "bookworm", "huggingface")
    assert {path: path.read_text() for path in where.parent.iterdir()} == before | {own: own.read_text()}
    assert debian_lock.read_lock(copy, "bookworm", "huggingface") == DebianLock({}, {LIBC: TWO})
    assert (pulls, [script.endswith(" jq") for script in scripts]) == ([False], [True])
    assert debian_lock.comparison_files(copy, "bookworm") == parent
    sources = gather_sources(copy, matrix, matrix.select(HUGGINGFACE_CPU), {})
    assert sources.debian["lock.txt"].decode().splitlines()[1:] == [f"{LIBC} {TWO}", f"{PYTHON} {ONE}"]
    words = debian_lock.describe_drift(copy, sources.image, ["x.deb"])
    assert "not those of dockerfiles/debian/bookworm-huggingface.txt: x.deb." in words
    assert f"Fix: shoal lock --bases {sources.image.tag}, then build again" in words
    template.write_text(old)
    dependencies.lock_images(["pytorch"], bases=True)
    assert not own.exists()
    assert pulls == [False, True]


def test_how_a_lock_changed_is_reported() -> None:
    before, after = (
        DebianLock({MADE: "a"}, {PYTHON: ONE, "x.deb": ONE}),
        DebianLock({MADE: "b"}, {PYTHON: ONE, LIBC: TWO}),
    )
    assert debian_lock.describe_changes(before, after) == [f"+ {LIBC}", "- x.deb", f"! {MADE}: a → b"]
