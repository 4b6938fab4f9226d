"""The wheels of `shoal` itself and of all that it needs, for a machine that has a Python and no network."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from shoal.matrix.project import Project
from shoal.sources import packages

COMMAND = "python3 -m venv .venv && .venv/bin/pip install --no-index --find-links {directory} shoal"
"""What installs them there, for people to type."""


def collect(project: Project, scratch: Path) -> str:
    """Fill `scratch`/wheels, for machines with this one's Python and processor. Return pip's words where it fails.

    Versions are those that the project's tests run with, where it pins any.
    """
    for name in ("own", "wheels", "temporary"):
        (scratch / name).mkdir()
    own = packages.build_wheel(project.root / "images", scratch / "own")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--only-binary=:all:",
        f"--dest={scratch / 'wheels'}",
    ]
    pins = project.root / "requirements" / "dev.txt"
    command += [f"--constraint={pins}"] if pins.is_file() else []
    # An interrupt kills it, with no time to remove what it has begun.
    environment = {**os.environ, "TMPDIR": str(scratch / "temporary")}
    result = subprocess.run([*command, str(own)], env=environment, capture_output=True, text=True, check=False)
    return result.stderr.strip() if result.returncode else ""
