"""Explains why a set-up command failed, in one line if it is pip: its last line is only a hint, its first a symptom.

Source: the output of pip 23.0 to 26.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from shoal_toolkit import redact
from shoal_toolkit.errors import LaunchError
from shoal_toolkit.files import read_table
from shoal_toolkit.job.machine import find_installed_version
from shoal_toolkit.system import failure_facts

_CONFLICT = re.compile(r"^The conflict is caused by:\n((?: +\S.*\n?)+)", re.MULTILINE)
_ASKED, _FIXED = "The user requested ", "The user requested (constraint) "
_BUILD = re.compile(r"╰─> \[\d+ lines? of output\]\n(?P<output>.*?)\n *\[end of output\]", re.DOTALL)
_PACKAGE = re.compile(r"^ *(?:Collecting|Processing|Building (?:wheel|editable) for) (?P<name>\S+)", re.MULTILINE)
_DIAGNOSIS = re.compile(r"^error: (?P<kind>.+)\n\n× (?P<what>.+)", re.MULTILINE)
_REMARK = re.compile(r"^(?:hint|note|WARNING|INFO|\[notice\])\b", re.IGNORECASE)


def explain_setup_failure(command: Sequence[str], code: int, output: str) -> LaunchError:
    """Returns the error for a set-up command that failed: pip's cause, the command and the end of its output."""
    reason = explain_pip_failure(output) or "it printed nothing"
    shown = format_command(command, output)
    return LaunchError(f"{reason}\nBefore the launch, this command exited with code {code}: {shown}")


def format_command(command: Sequence[str], output: str) -> str:
    """Returns a command and the last ten lines of its output, with masked secrets in the command."""
    lines = [line for line in output.splitlines() if line.strip()]
    return " ".join(redact.mask_arguments(command)) + "\n\n" + "\n".join(lines[-10:])


def explain_pip_failure(output: str) -> str:
    """Returns the cause of a failure from the output of pip; empty if that is empty."""
    return (
        _explain_conflict(output)
        or _explain_known(output)
        or _explain_build(output)
        or _explain_diagnosis(output)
        or _first_error(output)
    )


def _explain_conflict(output: str) -> str:
    found = _CONFLICT.search(output)
    if found is None:
        return ""
    lines = [line.strip() for line in found[1].splitlines()]
    fixed = [line.removeprefix(_FIXED) for line in lines if line.startswith(_FIXED)]
    asked = " and ".join(_format_requirement(line) for line in lines if not line.startswith(_FIXED))
    if not fixed:
        return f"requirements.txt: these requirements conflict: {asked}."
    return (
        f"{asked}, but this image has {' and '.join(map(_format_installed, fixed))}. Fix: "
        "require a version that fits, remove the line, or use an image with the other version."
    )


def _format_requirement(line: str) -> str:
    return f"requirements.txt asks for {line.removeprefix(_ASKED)}" if line.startswith(_ASKED) else line


def _format_installed(constraint: str) -> str:
    """Returns the installed version for a constraint, and which versions are allowed: numpy<3,>=2 → numpy 2.4.6, …"""
    name, allowed = re.fullmatch(r"([\w.-]+)(.*)", constraint).groups()  # type: ignore[union-attr]
    version = find_installed_version(name.replace("-", "_"), sys.path)
    if allowed.startswith("=="):
        return f"{name} {version or allowed[2:]}, which keeps its version"
    return f"{name} {version or ''}, which must stay {allowed.strip()} for its other packages"


def _explain_known(output: str) -> str:
    for entry in read_table("failures")["pip"]:
        if found := re.search(entry["words"], output):
            values = {"host": _find_host(output), **found.groupdict("")}
            values["full"] = ", ".join(failure_facts.find_full_mounts()) or "a file system"
            return str(entry["head"]).format_map({name: text.strip() for name, text in values.items()})
    return ""


def _find_host(output: str) -> str:
    found = re.search(r"host='([^']+)'", output) or re.search(r"https?://(?:[^/@\s]*@)?([^/\s]+)/", output)
    return found[1] if found else "the index"


def _explain_build(output: str) -> str:
    found = _BUILD.search(output)
    if found is None:
        return ""
    before = list(_PACKAGE.finditer(output, 0, found.start()))
    package = before[-1]["name"] if before else "a package"
    return f"pip cannot build {package}: {_last_line([line.strip() for line in found['output'].splitlines()])}"


def _explain_diagnosis(output: str) -> str:
    found = _DIAGNOSIS.search(output)
    return f"{found['kind']}: {found['what']}" if found else ""


def _first_error(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return errors[0] if errors else _last_line([line for line in lines if not _REMARK.match(line)] or lines)


def _last_line(lines: Sequence[str]) -> str:
    return next((line for line in reversed(lines) if line), "")
