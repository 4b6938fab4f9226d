"""pip's settings on this machine, read as pip's documentation defines (Configuration): files, then the environment.

`pip config list` prints the same, and tests compare both. Reasons not to use it: it starts another Python for each
build, and environments made by uv have no pip.
"""

from __future__ import annotations

import configparser
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from shoal.errors import SpecError

_SECTIONS = ("global", "install")
"""The sections that apply to `pip install`, in ascending priority."""
_NOT_OPTIONS = ("version", "help")


def read_pip_settings(environment: Mapping[str, str] = os.environ, prefix: str = sys.prefix) -> dict[str, str]:
    """Returns the settings of `pip install`, by option. Line breaks become spaces; empty values are left out.

    As in pip, no file is read if PIP_CONFIG_FILE is `os.devnull`.

    Args:
        environment: The environment variables to read.
        prefix: The Python environment, which may have a pip.conf.

    Raises:
        SpecError: If a file is not a valid configuration. pip fails on it too.
    """
    settings: dict[str, dict[str, str]] = {section: {} for section in _SECTIONS}
    if environment.get("PIP_CONFIG_FILE") != os.devnull:
        for path in _config_files(environment, Path(prefix)):
            parser = _parse_file(path)
            for section in filter(parser.has_section, _SECTIONS):
                settings[section] |= {_option_name(key): value for key, value in parser.items(section)}
    variables = {_option_name(key[4:]): value for key, value in environment.items() if key.startswith("PIP_")}
    stages = (*settings.values(), {key: value for key, value in variables.items() if key not in _NOT_OPTIONS})
    return {key: value.replace("\n", " ").strip() for stage in stages for key, value in stage.items() if value}


def _parse_file(path: Path) -> configparser.RawConfigParser:
    """Reads one file of pip; a missing or unreadable one is empty. Raises `SpecError` if it is not valid."""
    parser = configparser.RawConfigParser()
    try:
        parser.read(path)
    except (configparser.Error, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: not a valid pip configuration: {error}. Fix: correct the file") from error
    return parser


def _config_files(environment: Mapping[str, str], prefix: Path) -> Iterator[Path]:
    """Yields the files that pip reads, in ascending priority; they may not exist."""
    home = Path(environment.get("HOME") or Path.home())
    for directory in (environment.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(os.pathsep):
        yield Path(directory, "pip", "pip.conf")
    yield Path("/etc/pip.conf")
    own = environment.get("PIP_CONFIG_FILE")
    if not own or not Path(own).exists():
        yield home / ".pip" / "pip.conf"
        yield Path(environment.get("XDG_CONFIG_HOME") or home / ".config", "pip", "pip.conf")
    yield prefix / "pip.conf"
    if own:
        yield Path(own)


def _option_name(key: str) -> str:
    """Returns the name of an option for `--Name_of`, a key of a file or the rest of a PIP_ variable."""
    return key.lower().replace("_", "-").removeprefix("--")
