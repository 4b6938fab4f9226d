"""scripts/setup.sh: it finds Python 3.11, and uv gets the indexes that pip is configured with."""

from __future__ import annotations

import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT: dict[str, Any] = runpy.run_path(str(ROOT / "scripts/uv_settings.py"))


def test_uv_gets_pips_settings_and_the_environment_wins() -> None:
    said = [
        ":env:.index-url='https://me:secret@new.example/simple'",
        "download.index-url='https://download.example/simple'",
        "global.index-url='https://old.example/simple'",
        "global.extra-index-url='\\nfile:///one\\nfile:///two'",
        "global.timeout='60'",
        "global.find-links='/wheels /more'",
        "install.no-index='true'",
    ]
    assert SCRIPT["variables_of"](said) == {
        "UV_DEFAULT_INDEX": "https://me:secret@new.example/simple",
        "UV_INDEX": "file:///one file:///two",
        "UV_FIND_LINKS": "/wheels,/more",
        "UV_NO_INDEX": "1",
    }
    assert SCRIPT["variables_of"]([]) == {}


@pytest.mark.parametrize(
    ("uv", "words"),
    [
        (None, "setup: Shoal needs Python 3.11; python3 is Python 3.12.3. Fix: make setup PYTHON="),
        ('[ "$2" = find ] && echo "${0%uv}found"; exit 0', "setup: making .venv with Python 3.11.9"),
        ('[ "$2" = find ]', "setup: Shoal needs Python 3.11; python3 is Python 3.12.3. Fix: make setup PYTHON="),
    ],
)
def test_python_comes_from_uv_if_the_machine_has_another(tmp_path: Path, uv: str | None, words: str) -> None:
    """The programs are stand-ins. The found Python ends the script where it would make .venv."""
    for name in ("scripts", "requirements", "images", "toolkit", "library", "rehearsal"):
        (tmp_path / name).symlink_to(ROOT / name)
    programs = {
        "python3": 'case "$1" in --version) echo Python 3.12.3 ;; *) exit 1 ;; esac',
        "found": 'case "$1" in --version) echo Python 3.11.9 ;; -m) exit 9 ;; esac',
        "cc": "exit 0",
        **({"uv": uv} if uv else {}),
    }
    (tmp_path / "bin").mkdir()
    for name, body in programs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    for name in ("bash", "cat", "dirname", "id", "sha256sum"):
        (tmp_path / "bin" / name).symlink_to(f"/usr/bin/{name}")
    command = [tmp_path / "scripts" / "setup.sh"]
    env = {"PATH": str(tmp_path / "bin")}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert ended.returncode
    assert ended.stderr.startswith(words)
