"""pip's settings are read as pip itself reads them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.errors import SpecError
from shoal.network import settings

LIST = re.compile(r"^(global|install|:env:)\.([\w-]+)='(.*)'$", re.MULTILINE)


def reported_by_pip(environment: dict[str, str]) -> dict[str, str]:
    """Return the settings of `pip install` in the output of `pip config list`; variables override files."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listing = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    found = [
        (scope == ":env:", scope, key, value.replace("\\n", " ").strip()) for scope, key, value in LIST.findall(listing)
    ]
    return {key: value for _, _, key, value in sorted(found)}


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """Settings in several files, some of them twice, and the variables that name their directories."""
    files = {
        "etc/pip/pip.conf": "[global]\nindex-url = https://one.example/simple\ntimeout = 1\n[install]\nno-binary = a\n",
        "home/.pip/pip.conf": "[global]\nindex-url = https://two.example/simple\nretries = 2\n",
        "home/.config/pip/pip.conf": "[global]\nextra_index_url =\n    https://a.example\n    https://b.example\n"
        "[install]\ntimeout = 3\n[freeze]\ntimeout = 9\n",
        "own.conf": "[global]\ntrusted-host = a.example\nretries = 7\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return {"HOME": str(tmp_path / "home"), "XDG_CONFIG_DIRS": str(tmp_path / "etc"), "PATH": "/usr/bin:/bin"}


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"PIP_TIMEOUT": "60", "PIP_FIND_LINKS": "/a /b", "PIP_VERSION": "1"},
        {"PIP_CONFIG_FILE": "own.conf"},
        {"PIP_CONFIG_FILE": "missing.conf"},
        {"PIP_CONFIG_FILE": "/dev/null", "PIP_RETRIES": "5"},
        {"XDG_CONFIG_HOME": "etc"},
    ],
)
def test_settings_equal_those_of_pip(
    machine: dict[str, str], variables: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    environment = machine | variables
    found = settings.read_pip_settings(environment)
    assert found == reported_by_pip(environment)


def test_environment_overrides_files(machine: dict[str, str]) -> None:
    assert settings.read_pip_settings(machine)["timeout"] == "3"
    assert settings.read_pip_settings(machine | {"PIP_TIMEOUT": "60"})["timeout"] == "60"
    assert settings.read_pip_settings(machine)["extra-index-url"] == "https://a.example https://b.example"


def test_empty_values_are_ignored(machine: dict[str, str]) -> None:
    """`pip config list` shows them, but `pip install` ignores them."""
    path = Path(machine["HOME"], ".config", "pip", "pip.conf")
    path.write_text(path.read_text() + "index-url =\n")
    found = settings.read_pip_settings(machine | {"PIP_INDEX_URL": "", "PIP_TIMEOUT": ""})
    assert (found["index-url"], found["timeout"]) == ("https://two.example/simple", "3")


def test_invalid_file_is_an_error(machine: dict[str, str]) -> None:
    path = Path(machine["HOME"], ".pip", "pip.conf")
    path.write_text("no section\n")
    with pytest.raises(SpecError, match=f"{path}: not a valid pip configuration"):
        settings.read_pip_settings(machine)
