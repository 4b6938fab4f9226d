"""Where the sources of images come from: the commit that they are, and where the project says that they are kept."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import tomllib

from shoal.matrix.project import Project

GOES_IN = ("buildspec.yml", "dockerfiles", "images", "library", "rehearsal", "toolkit")
"""What images are made of, and by."""


@dataclass(frozen=True)
class Provenance:
    """The commit of the sources (hexadecimal), and the URL of their repository; empty where nobody can tell."""

    revision: str = ""
    source: str = ""


def read(project: Project) -> Provenance:
    """Ask git, and the packages' pyproject.toml."""
    return Provenance(revision(project.root), _declared(project.root))


def revision(root: Path) -> str:
    """Return the last commit that changed what goes in, so that others leave images as they are.

    Empty where that has been changed since, where nothing of it is committed, or no git is there to say so; and in a
    shallow clone that ends before such a commit, for it would call the last one that it has.
    """
    if _git(root, "status", "--porcelain", "--untracked-files=normal", "--", *GOES_IN) != "":
        return ""
    commit, *parents = (_git(root, "log", "-1", "--format=%H %P", "--", *GOES_IN) or "").split() or [""]
    is_cut = not parents and _git(root, "rev-parse", "--is-shallow-repository") != "false"
    return "" if is_cut else commit


def _git(root: Path, *arguments: str) -> str | None:
    """Return what git prints; None where it fails, or is not there."""
    # Of a hook's own repository, which may be another.
    environment = {name: value for name, value in os.environ.items() if name not in ("GIT_DIR", "GIT_INDEX_FILE")}
    command = ["git", "--no-optional-locks", "-c", "log.showSignature=false", "-C", str(root), *arguments]
    try:
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return None if ended.returncode else ended.stdout.strip()


def _declared(root: Path) -> str:
    """Return the URL that a package of ours declares as that of its source."""
    for path in filter(Path.is_file, (root / room / "pyproject.toml" for room in ("images", "library", "toolkit"))):
        urls = tomllib.loads(path.read_text()).get("project", {}).get("urls", {})
        for name, url in urls.items():
            if name.lower() in ("source", "repository"):
                return str(url)
    return ""
