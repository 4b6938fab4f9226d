"""What pip is set to on this machine, read as pip's documentation says (Configuration): files, then the environment.

pip itself would say it (`pip config list`, which the tests compare this with), but takes longer to start than the rest
of a build's preparations together, and has no interface to import.
"""

from __future__ import annotations

import configparser
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from shoal.errors import SpecError

_SECTIONS = ("global", "install")
"""Those that hold for `pip install`, the stronger one last."""
_NOT_OPTIONS = ("version", "help")


def read(environment: Mapping[str, str] = os.environ, prefix: str = sys.prefix) -> dict[str, str]:
    """Return the settings of `pip install` by the names of its options, line ends as spaces; empty ones set nothing.

    Raises SpecError for a file that is no configuration, as pip fails too.
    """
    settings: dict[str, dict[str, str]] = {section: {} for section in _SECTIONS}
    if environment.get("PIP_CONFIG_FILE") != os.devnull:
        for path in _files(environment, Path(prefix)):
            parser = _parsed(path)
            for section in filter(parser.has_section, _SECTIONS):
                settings[section] |= {_name(key): value for key, value in parser.items(section)}
    variables = {_name(key[4:]): value for key, value in environment.items() if key.startswith("PIP_")}
    stages = (*settings.values(), {key: value for key, value in variables.items() if key not in _NOT_OPTIONS})
    return {key: value.replace("\n", " ").strip() for stage in stages for key, value in stage.items() if value}


def _parsed(path: Path) -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser()
    try:
        parser.read(path)
    except (configparser.Error, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: not a configuration of pip: {error}. Correct it; pip refuses it too") from error
    return parser


def _files(environment: Mapping[str, str], prefix: Path) -> Iterator[Path]:
    """Yield the files that pip looks for, the strongest last."""
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


def _name(key: str) -> str:
    return key.lower().replace("_", "-").removeprefix("--")
