"""Why pip failed, in one line, from what it printed: its own last line is a hint, and its first error may be a symptom.

Source: the output of pip 23.0 to 26.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from shoal_toolkit.plan.environment import installed_version
from shoal_toolkit.system import disks
from shoal_toolkit.tables import read_table

_CONFLICT = re.compile(r"^The conflict is caused by:\n((?: +\S.*\n?)+)", re.MULTILINE)
_ASKED, _FIXED = "The user requested ", "The user requested (constraint) "
_BUILD = re.compile(r"╰─> \[\d+ lines? of output\]\n(?P<output>.*?)\n *\[end of output\]", re.DOTALL)
_PACKAGE = re.compile(r"^ *(?:Collecting|Processing|Building (?:wheel|editable) for) (?P<name>\S+)", re.MULTILINE)
_DIAGNOSIS = re.compile(r"^error: (?P<kind>.+)\n\n× (?P<what>.+)", re.MULTILINE)
_REMARK = re.compile(r"^(?:hint|note|WARNING|INFO|\[notice\])\b", re.IGNORECASE)


def describe(output: str) -> str:
    """Return the cause of a failure; empty where nothing was printed."""
    return _conflict(output) or _known(output) or _build(output) or _diagnosis(output) or _first_error(output)


def _conflict(output: str) -> str:
    found = _CONFLICT.search(output)
    if found is None:
        return ""
    lines = [line.strip() for line in found[1].splitlines()]
    fixed = [line.removeprefix(_FIXED) for line in lines if line.startswith(_FIXED)]
    asked = " and ".join(_wish(line) for line in lines if not line.startswith(_FIXED))
    if not fixed:
        return f"requirements.txt: no versions fit together: {asked}."
    return (
        f"{asked}, but this image has {' and '.join(map(_installed, fixed))}, which stays. Fix: ask for a version that "
        "fits or leave the line out, or use an image that has the other version."
    )


def _wish(line: str) -> str:
    return f"requirements.txt asks for {line.removeprefix(_ASKED)}" if line.startswith(_ASKED) else line


def _installed(constraint: str) -> str:
    """numpy<3,>=2 → numpy 2.4.6."""
    name = re.split(r"[<>=!~ ]", constraint, maxsplit=1)[0]
    version = installed_version(name.replace("-", "_"), sys.path)
    return f"{name} {version}" if version else constraint


def _known(output: str) -> str:
    for entry in read_table("failures")["pip"]:
        if found := re.search(entry["words"], output):
            named = {"host": _host(output), **found.groupdict("")}
            named["full"] = ", ".join(disks.full_mounts()) or "a file system"
            return str(entry["head"]).format_map({name: text.strip() for name, text in named.items()})
    return ""


def _host(output: str) -> str:
    """Return the host of the request that failed, else of the first index."""
    found = re.search(r"host='([^']+)'", output) or re.search(r"https?://(?:[^/@\s]*@)?([^/\s]+)/", output)
    return found[1] if found else "the index"


def _build(output: str) -> str:
    found = _BUILD.search(output)
    if found is None:
        return ""
    before = list(_PACKAGE.finditer(output, 0, found.start()))
    package = before[-1]["name"] if before else "a package"
    return f"pip cannot build {package}: {_last([line.strip() for line in found['output'].splitlines()])}"


def _diagnosis(output: str) -> str:
    found = _DIAGNOSIS.search(output)
    return f"{found['kind']}: {found['what']}" if found else ""


def _first_error(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return errors[0] if errors else _last([line for line in lines if not _REMARK.match(line)] or lines)


def _last(lines: Sequence[str]) -> str:
    return next((line for line in reversed(lines) if line), "")
