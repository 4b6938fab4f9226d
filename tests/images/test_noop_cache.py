"""What is remembered of builds that found all up to date: what the builder said, and only while that holds."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.images.test_builds import ONE, FakeEngine, checkout, fake, shoal

from shoal.builds import noop_cache
from shoal.builds.noop_cache import BuildCommand
from shoal.matrix.project import Project

__all__ = ["checkout", "fake"]

DEBIAN = "debian:bookworm-slim"
REMEMBERED = ".cache/shoal/unchanged.json"


@pytest.fixture
def known(fake: FakeEngine, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of which `build one-*` is remembered."""
    monkeypatch.setenv("DOCKER_HOST", fake.address)
    fake.images[ONE] = {}
    noop_cache.save_answer(asked(checkout), ["✓ one"], {tag: noop_cache._ask_docker(tag)[1] for tag in (ONE, DEBIAN)})
    return checkout


def asked(root: Path, *words: str) -> BuildCommand:
    """Return what `build one-*`, or another command, asks, as if the files had lain there for long."""
    found = noop_cache.read_command(["build", *(words or ["one-*"])], str(root))
    assert found
    found.settled = True
    return found


def answer(root: Path, *words: str) -> list[str] | None:
    return noop_cache.find_answer(asked(root, *words))


def test_the_command_says_what_the_builder_said(fake: FakeEngine, checkout: Path) -> None:
    built = shoal(fake, checkout, "build", "one-*")
    assert built[0] == 0
    deadline = time.monotonic() + 60
    while not (checkout / REMEMBERED).exists():
        assert shoal(fake, checkout, "build", "one-*")[0] == 0
        assert time.monotonic() < deadline, "the inputs never settle"
    before = len(fake.asked)
    code, out, err = shoal(fake, checkout, "build", "one-*")
    assert (code, err) == (0, "")
    assert out.startswith(f"✓ {ONE} up to date (")
    # Images were asked for, in words of HTTP that name no version of the API: not by the builder.
    assert {path.partition("/images/")[0] for path in fake.asked[before:]} == {""}


def test_other_words_are_another_question(known: Path) -> None:
    assert answer(known, "one-*") == ["✓ one"]
    assert answer(known, ONE) is None


@pytest.mark.parametrize(
    "arguments", [["plan"], ["build", "--json"], ["build", "--all", "--dry-run"], ["build", "one-*", "-j", "1"], []]
)
def test_only_plain_builds_are_remembered(known: Path, arguments: list[str]) -> None:
    assert noop_cache.read_command(arguments, str(known)) is None


@pytest.mark.parametrize(
    "changed", ["buildspec.yml", "dockerfiles/one.j2", "dockerfiles/versions.yml", "toolkit/shoal_toolkit/cli.py"]
)
def test_a_file_of_the_same_size_and_time_that_was_written_again_is_another(known: Path, changed: str) -> None:
    path = known / changed
    before = path.stat()
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert answer(known) is None


def test_a_new_file_counts(known: Path) -> None:
    (known / "toolkit" / "shoal_toolkit" / "new.py").touch()
    assert answer(known) is None


def test_bytecode_does_not_count(known: Path) -> None:
    (known / "toolkit" / "shoal_toolkit" / "__pycache__").mkdir(exist_ok=True)
    (known / "toolkit" / "shoal_toolkit" / "__pycache__" / "new.pyc").touch()
    assert answer(known)


def test_an_image_that_is_gone_or_another_ends_it(fake: FakeEngine, known: Path) -> None:
    labels = fake.images[ONE]
    fake.images[ONE] = {**labels, "rebuilt": "elsewhere"}
    assert answer(known) is None
    del fake.images[ONE]
    assert answer(known) is None
    fake.images[ONE] = labels
    assert answer(known)


def test_another_base_ends_it(fake: FakeEngine, known: Path) -> None:
    fake.images[DEBIAN] = {"security": "update"}
    assert answer(known) is None


def test_what_changed_since_the_builder_looked_is_not_remembered(known: Path) -> None:
    noop_cache.save_answer(asked(known, ONE), ["text"], {ONE: "sha256:another"})
    assert answer(known, ONE) is None


def test_a_cache_that_cannot_be_written_remembers_nothing(known: Path) -> None:
    (known / REMEMBERED).unlink()
    (known / REMEMBERED).mkdir()
    noop_cache.save_answer(asked(known), ["text"], {})
    assert [path.name for path in (known / REMEMBERED).parent.iterdir()] == ["unchanged.json"]


def test_no_engine_and_another_engine_end_it(known: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent.sock")
    assert answer(known) is None
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
    assert answer(known) is None


def test_a_torn_file_is_nothing(known: Path) -> None:
    file = known / REMEMBERED
    file.write_text(file.read_text()[:-5])
    assert answer(known) is None


def test_inputs_that_just_changed_are_not_remembered(known: Path) -> None:
    """On a file system with a coarse clock, they could change again unseen."""
    (known / "buildspec.yml").touch()
    found = noop_cache.read_command(["build", "--all"], str(known))
    assert found
    assert not found.settled
    noop_cache.save_answer(found, ["text"], {})
    assert noop_cache.find_answer(found) is None


def test_answering_imports_neither_the_builder_nor_the_engines_client(project: Project) -> None:
    code = "import sys, shoal.cli; print({'docker', 'typer', 'pydantic', 'rich', 'http', 'pathlib'} & {*sys.modules})"
    command = [sys.executable, "-S", "-c", code]
    path = {"PYTHONPATH": str(project.root / "images")}
    assert subprocess.run(command, capture_output=True, text=True, check=True, env=path).stdout == "set()\n"
