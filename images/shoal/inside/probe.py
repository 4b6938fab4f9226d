"""Says, as JSON, what is installed where it runs. The text of this file is what a container's Python is given."""

import importlib.metadata
import json
import os
import platform
import re
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
        "system": platform.freedesktop_os_release(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "distributions": sorted(map(distribution, importlib.metadata.distributions()), key=lambda d: d["name"].lower()),
        "packages": packages(),
        "commands": {name: said(command) for name, command in COMMANDS.items()},
        "environment": dict(sorted(os.environ.items())),
    }
    print(json.dumps(facts))


def distribution(found: importlib.metadata.Distribution) -> dict[str, str]:
    about = found.metadata
    return {
        "name": about["Name"],
        "version": found.version,
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
    rows = subprocess.run(DPKG, capture_output=True, text=True, check=True).stdout.splitlines()
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
    """The first line that a command prints; nothing where there is no such command."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        return ""
    return (ended.stdout or ended.stderr).strip().partition("\n")[0]


if __name__ == "__main__":
    main()
