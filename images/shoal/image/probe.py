"""Prints, as JSON, what is installed. This program runs in containers, with the Python of any image."""

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
    """Prints the JSON object: system, python, machine, distributions, packages, commands and environment."""
    facts = {
        "system": read_os_release("/etc/os-release", "/usr/lib/os-release"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "distributions": list_distributions(),
        "packages": list_packages(),
        "commands": {name: read_first_line(command) for name, command in COMMANDS.items()},
        "environment": dict(sorted(os.environ.items())),
    }
    print(json.dumps(facts))


def read_os_release(*paths: str) -> dict[str, str]:
    """Returns the fields of the first file that exists; none if no file exists.

    Python has a function for it only since 3.10.
    """
    for path in map(Path, paths):
        if path.is_file():
            lines = re.findall(r"^([A-Z0-9_]+)=(.*)$", path.read_text(errors="replace"), re.MULTILINE)
            return {name: " ".join(shlex.split(value)) for name, value in lines}
    return {}


def list_distributions() -> list[dict[str, str]]:
    """Returns the distributions that have a name. Others are leftovers of a failed removal; pip ignores them too."""
    named = [found for found in importlib.metadata.distributions() if found.metadata["Name"]]
    return sorted(map(describe_distribution, named), key=lambda about: about["name"].lower())


def describe_distribution(found: importlib.metadata.Distribution) -> dict[str, str]:
    """Returns the name, version, licence and homepage of a distribution; empty if it does not name them.

    The licence is its SPDX expression, otherwise the one of its classifiers, otherwise a short field License.
    """
    about = found.metadata
    licence = about["License-Expression"] or join_classifiers(about.get_all("Classifier") or [])
    return {
        "name": about["Name"],
        "version": about["Version"] or "",
        "licence": licence or read_short_licence(about),
        "homepage": about["Home-page"] or "",
    }


def join_classifiers(classifiers: list[str]) -> str:
    """Returns the licences among the classifiers of a distribution, joined by AND."""
    names = [line.rsplit(" :: ", 1)[1] for line in classifiers if line.startswith("License :: ")]
    return " AND ".join(name for name in names if name != "OSI Approved")


def read_short_licence(about: importlib.metadata.PackageMetadata) -> str:
    """Returns the field License if it is a name, and not the text of a licence."""
    text = about["License"] or ""
    return text if len(text) < 80 and "\n" not in text and text != "UNKNOWN" else ""


def list_packages() -> list[dict[str, str]]:
    """Returns the name, version, architecture, source package and licence of each Debian package; none without dpkg.

    Raises CalledProcessError if dpkg-query fails.
    """
    try:
        rows = subprocess.run(DPKG, capture_output=True, text=True, check=True).stdout.splitlines()
    except FileNotFoundError:
        return []
    names = ("name", "version", "architecture", "source")
    found = [dict(zip(names, row.split("\t"))) for row in rows]
    return [{**package, "licence": read_copyright(package["name"])} for package in found]


def read_copyright(package: str) -> str:
    """Returns the licences that a package's copyright file names, joined by AND.

    Empty if there is no such file, or it is not in Debian's machine-readable format.
    """
    path = Path("/usr/share/doc", package, "copyright")
    text = path.read_text(errors="replace") if path.is_file() else ""
    names = re.findall(r"^License:[ \t]*(\S.*)$", text, re.MULTILINE) if text.startswith("Format:") else []
    return " AND ".join(dict.fromkeys(name.strip() for name in names))


def read_first_line(command: list[str]) -> str:
    """Returns the first line that a command prints, on standard error if it prints nothing else.

    Empty if there is no such command, it cannot run, or it takes longer than a minute.
    """
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (ended.stdout or ended.stderr).strip().partition("\n")[0]


if __name__ == "__main__":
    main()
