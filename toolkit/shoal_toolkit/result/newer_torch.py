"""Says which release of PyTorch brought a name that a script did not find.

data/torch_names.json has the names, by module and first release. scripts/torch_names.py writes it from the releases.
"""

from __future__ import annotations

import importlib.metadata
import re

from shoal_toolkit.files import read_table

_MISSING = re.compile(
    r"ImportError: cannot import name '(?P<name>\w+)' from '(?P<of>torch[\w.]*)' \(\S*-packages/"
    r"|AttributeError: module '(?P<module>torch[\w.]*)' has no attribute '(?P<attribute>\w+)'"
    r"|ModuleNotFoundError: No module named '(?P<path>torch\.[\w.]+)'"
)


def find_newer_torch(head: str, installed: str | None = None) -> str:
    """Returns advice for an exception about a name that a later torch has; empty if the cause is another one.

    Args:
        head: The line with the exception.
        installed: The version of torch; None: the version that this Python has.
    """
    found = _MISSING.search(head)
    if not found:
        return ""
    name, release = _find_release(found)
    try:
        installed = installed or importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""
    if not release or _read_version(installed) >= _read_version(release):
        return ""
    return (
        f"{name} came with torch {release}, and this image has torch {installed.partition('+')[0]}. Fix: use an image "
        "with a later torch, such as pytorch-latest, or pytorch-cpu without GPUs."
    )


def _find_release(found: re.Match[str]) -> tuple[str, str]:
    """Returns the missing name with its module, and the release that brought it; an empty one if none is known."""
    if found["path"]:
        parts = found["path"].split(".")
        paths = [(".".join(parts[:end]), parts[end]) for end in range(1, len(parts))]
    else:
        paths = [(found["of"] or found["module"], found["name"] or found["attribute"])]
    table = read_table("torch_names")
    for module, name in paths:
        for release, names in table.get(module, {}).items():
            if name in names.split():
                return f"{module}.{name}", release
    return "", ""


def _read_version(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:2]))
