"""Where tests keep their downloads and recordings: one directory for all checkouts of a user."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

DIRECTORY = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoal-tests"


def install(name: str, *arguments: str, option: str = "--target", with_dependencies: bool = False) -> Path:
    """Returns the directory `name`, in which pip has installed packages, once.

    Args:
        name: The name of the directory, with the version of its packages.
        arguments: More of `pip install`'s arguments, with the packages.
        option: `--target` or `--prefix`.
        with_dependencies: Whether to install their dependencies too.
    """
    directory = DIRECTORY / name
    if directory.exists():
        return directory
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    pip += [] if with_dependencies else ["--no-deps"]
    with tempfile.TemporaryDirectory(dir=DIRECTORY) as made:
        subprocess.run([*pip, option, f"{made}/packages", *arguments], check=True)
        try:
            Path(made, "packages").rename(directory)
        except OSError:
            if not directory.exists():  # another test process was not quicker
                raise
    return directory
