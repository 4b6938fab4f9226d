"""scripts/setup.sh: it finds a Python, and uv gets the indexes that pip is configured with."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from shoal_toolkit.sidecars.uv import convert_settings

ROOT = Path(__file__).resolve().parents[1]


def test_uv_gets_pips_settings_and_the_environment_wins() -> None:
    settings = [
        ":env:.index-url='https://me:secret@new.example/simple'",
        "download.index-url='https://download.example/simple'",
        "global.index-url='https://old.example/simple'",
        "global.extra-index-url='\\nfile:///one\\nfile:///two'",
        "global.timeout='60'",
        "global.find-links='/wheels /more'",
        "install.no-index='true'",
        "install.cert='/ca.crt'",
    ]
    assert convert_settings(settings) == {
        "UV_DEFAULT_INDEX": "https://me:secret@new.example/simple",
        "UV_INDEX": "file:///one file:///two",
        "UV_FIND_LINKS": "/wheels,/more",
        "UV_NO_INDEX": "1",
        "SSL_CERT_FILE": "/ca.crt",
    }
    assert convert_settings([]) == {}


@pytest.mark.parametrize(
    ("uv", "words"),
    [
        (None, "setup: Shoal needs Python 3.11 to 3.14; python3 is Python 3.10.2. Fix: make setup PYTHON="),
        ('[ "$2" = find ] && echo "${0%uv}found"; exit 0', "setup: making .venv with Python 3.11.9"),
        (
            '[ "$2" = find ]',
            "setup: Shoal needs Python 3.11 to 3.14; python3 is Python 3.10.2. Fix: make setup PYTHON=",
        ),
    ],
)
def test_python_comes_from_uv_if_the_machine_has_another(tmp_path: Path, uv: str | None, words: str) -> None:
    """The programs are stand-ins. The found Python ends the script where it would make .venv."""
    programs = {
        "python3": 'case "$1" in --version) echo Python 3.10.2 ;; *) exit 1 ;; esac',
        "found": 'case "$1" in --version) echo Python 3.11.9 ;; -m) exit 9 ;; esac',
        **({"uv": uv} if uv else {}),
    }
    assert set_up(tmp_path, programs).startswith(words)


@pytest.mark.parametrize(
    ("minor", "words"),
    [
        *((minor, f"setup: making .venv with Python 3.{minor}.0") for minor in (11, 12, 13, 14)),
        *((minor, f"setup: Shoal needs Python 3.11 to 3.14; python3 is Python 3.{minor}.0.") for minor in (10, 15)),
    ],
)
def test_the_pythons_of_debian_and_ubuntu_are_used(tmp_path: Path, minor: int, words: str) -> None:
    code = f'import sys; sys.version_info = (3, {minor}); exec("""$2""")'
    cases = f"--version) echo Python 3.{minor}.0 ;; -c) exec {sys.executable} -c '{code}' ;; -m) exit 9 ;;"
    python = "case $1 in " + cases.replace("$2", "'\"$2\"'") + " esac"
    assert set_up(tmp_path, {"python3": python}).startswith(words)


def set_up(tmp_path: Path, programs: dict[str, str]) -> str:
    """Run the script with these programs and few others. It must fail. Return its messages."""
    for name in ("scripts", "requirements", "images", "toolkit", "checkpoint", "library", "rehearsal"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "bin").mkdir()
    for name, body in {**programs, "cc": "exit 0"}.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    for name in ("bash", "cat", "dirname", "id", "sha256sum"):
        (tmp_path / "bin" / name).symlink_to(f"/usr/bin/{name}")
    command = [tmp_path / "scripts" / "setup.sh"]
    env = {"PATH": str(tmp_path / "bin")}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert ended.returncode
    return ended.stderr


def test_shoal_is_set_up_with_what_it_imports_and_nothing_else() -> None:
    """`make setup` installs requirements/shoal.txt, and the tests have the same versions."""
    alone, everything = (
        (ROOT / "requirements" / name).read_text().splitlines()[1:] for name in ("shoal.txt", "dev.txt")
    )
    assert set(alone) < set(everything)
    needed, found = [*(distribution("shoal").requires or ())], set[str]()
    while needed:
        need = Requirement(needed.pop())
        name = canonicalize_name(need.name)
        if name in found | {"pip", "tomlkit"} or (need.marker and not need.marker.evaluate({"extra": ""})):
            continue  # a virtual environment has pip; hatchling imports tomlkit only to edit files
        found.add(name)
        needed += distribution(name).requires or ()
    assert found == {canonicalize_name(line.partition("==")[0]) for line in alone}


def test_make_lists_a_screen_of_targets_and_all_benchmarks() -> None:
    def run_make(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["make", *words], cwd=ROOT, capture_output=True, text=True, check=False)

    assert len(run_make("help").stdout.splitlines()) <= 15
    makefile = (ROOT / "Makefile").read_text()
    benchmarks = re.findall(r"^#: (\w+) ", makefile, re.MULTILINE)
    listed = run_make("bench").stdout
    assert [line.split()[2] for line in listed.splitlines()] == [f"NAME={name}" for name in benchmarks]
    for name in benchmarks:
        assert f" benchmarks/{name}" in run_make("-n", "bench", f"NAME={name}").stdout
    assert "NAME=foo: choose one of: " in run_make("bench", "NAME=foo").stderr
    for part in ("fast", "integration", "conformance", "faults", "soak"):
        assert "pytest" in run_make("-n", "test", f"PART={part}").stdout
    assert "PART=foo: choose one of: " in run_make("test", "PART=foo").stderr


@pytest.mark.parametrize(("target", "tools"), [("check", 8), ("fix", 4)])
@pytest.mark.parametrize("failing", ["ruff", ""])
def test_every_check_runs_and_each_failure_counts(tmp_path: Path, target: str, tools: int, failing: str) -> None:
    for name in ("ruff", "mypy", "shoal", "python"):
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\necho "finding of {name} $*"\n{"exit 1" if name == failing else ""}\n')
        program.chmod(0o755)
    command = ["make", "--no-print-directory", target, f"BIN={tmp_path}"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.stdout.count("finding of ") == tools
    assert bool(ended.returncode) == bool(failing)
    assert bool(re.search(f"^make: failed: {tmp_path}/{failing}", ended.stderr, re.MULTILINE)) == bool(failing)


def test_examples_write_only_where_git_ignores_it() -> None:
    """In the checkout and in the example's directory, from which users start them."""
    scripts = [path for path in ROOT.glob("examples/*/*.py") if "SM_MODEL_DIR" in path.read_text()]
    defaults = re.compile(r'"SM_(?:MODEL|OUTPUT_DATA)_DIR", "(\w+)"|BASE_DIR.*/?(checkpoints)"')
    written = {
        (path.parent / name, name)
        for path in scripts
        for names in defaults.findall(path.read_text())
        for name in names
        if name
    }
    assert len(written) >= 10
    places = [place for directory, name in written for place in (f"{directory}/x", f"{ROOT / name}/x")]
    ignored = subprocess.run(["git", "check-ignore", *places], cwd=ROOT, capture_output=True, text=True, check=False)
    assert set(ignored.stdout.splitlines()) == set(places)
