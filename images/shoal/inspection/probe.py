"""Says, as JSON, what is installed where it runs. The text of this file is what a container's Python is given."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
from pathlib import Path

COMMANDS = {
    "python": ["python", "--version"],
    "pip": ["pip", "--version"],
    "mpirun": ["mpirun", "--version"],
    "train": ["train", "--version"],
    "c++": ["c++", "--version"],
}
DPKG = ["dpkg-query", "--show", "--showformat=${Package}\t${Version}\t${Architecture}\t${source:Package}\n"]


def main() -> None:
    facts = {
        "system": system("/etc/os-release", "/usr/lib/os-release"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "distributions": distributions(),
        "packages": packages(),
        "commands": {name: said(command) for name, command in COMMANDS.items()},
        "environment": dict(sorted(os.environ.items())),
    }
    print(json.dumps(facts))


def system(*paths: str) -> dict[str, str]:
    """What the first of these files says; Python reads it itself from 3.10 on, and an image may have an older one."""
    for path in map(Path, paths):
        if path.is_file():
            lines = re.findall(r"^([A-Z0-9_]+)=(.*)$", path.read_text(errors="replace"), re.MULTILINE)
            return {name: " ".join(shlex.split(value)) for name, value in lines}
    return {}


def distributions() -> list[dict[str, str]]:
    """Less those without a name, such as what pip leaves of one that it could not remove: pip has none either."""
    named = [found for found in importlib.metadata.distributions() if found.metadata["Name"]]
    return sorted(map(distribution, named), key=lambda about: about["name"].lower())


def distribution(found: importlib.metadata.Distribution) -> dict[str, str]:
    about = found.metadata
    return {
        "name": about["Name"],
        "version": about["Version"] or "",
        "licence": about["License-Expression"] or classified(about.get_all("Classifier") or []) or short(about),
        "homepage": about["Home-page"] or "",
    }


def classified(classifiers: list[str]) -> str:
    names = [line.rsplit(" :: ", 1)[1] for line in classifiers if line.startswith("License :: ")]
    return " AND ".join(name for name in names if name != "OSI Approved")


def short(about: importlib.metadata.PackageMetadata) -> str:
    """The field License, where it is a name and not a whole text."""
    text = about["License"] or ""
    return text if len(text) < 80 and "\n" not in text and text != "UNKNOWN" else ""


def packages() -> list[dict[str, str]]:
    """None where there is no dpkg: not every system is Debian's."""
    try:
        rows = subprocess.run(DPKG, capture_output=True, text=True, check=True).stdout.splitlines()
    except FileNotFoundError:
        return []
    names = ("name", "version", "architecture", "source")
    found = [dict(zip(names, row.split("\t"))) for row in rows]
    return [{**package, "licence": copyright_of(package["name"])} for package in found]


def copyright_of(package: str) -> str:
    """The licences that a package's copyright file names, where it has Debian's machine-readable form."""
    path = Path("/usr/share/doc", package, "copyright")
    text = path.read_text(errors="replace") if path.is_file() else ""
    names = re.findall(r"^License:[ \t]*(\S.*)$", text, re.MULTILINE) if text.startswith("Format:") else []
    return " AND ".join(dict.fromkeys(name.strip() for name in names))


def said(command: list[str]) -> str:
    """The first line that a command prints; nothing where there is no such command, or it cannot be run."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (ended.stdout or ended.stderr).strip().partition("\n")[0]


if __name__ == "__main__":
    main()
