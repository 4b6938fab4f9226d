"""The origin of an image: its base image, the commit of its sources, and the URL of their repository, as OCI labels.

Title and version are in the templates. docs/decisions/labels.md
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import tomllib

from shoal.limits import KIB, MOST_GIT, MOST_GIT_OUTPUT, MOST_RECORD, read_file
from shoal.matrix.project import INSTALLED, Project

INPUTS = ("buildspec.yml", "dockerfiles", "checkpoint", "images", "library", "rehearsal", "toolkit")
"""The paths that images are made from, or by."""
REVISION = "revision"
"""The file with the commit of installed image definitions. A checkout does not have it."""
_PATIENCE = 60.0
"""Seconds in which git has to answer."""
_LIMITED = f'ulimit -d {MOST_GIT // KIB}; ulimit -f {MOST_GIT_OUTPUT // 512}; exec "$0" "$@"'
"""Starts git with a limit of its memory and its output: a small repository may hold trees with billions of files."""
_HARMLESS = re.compile(
    r"(?:advice|branch|color|commit|gc|init|maintenance|pull|push|rebase|submodule|tag|user)\..+"
    r"|remote\..+\.(?:fetch|prune|pushurl|tagopt|url)"
    r"|core\.(?:autocrlf|bare|eol|filemode|ignorecase|logallrefupdates|precomposeunicode|repositoryformatversion"
    r"|sharedrepository|symlinks)|extensions\.(?:objectformat|refstorage)"
)
"""The keys of a repository's configuration that make git run no program, in small letters."""


@dataclass(frozen=True)
class Provenance:
    """The commit of the sources (hexadecimal), and the URL of their repository; empty if unknown."""

    revision: str = ""
    source: str = ""


def read_provenance(project: Project) -> Provenance:
    """Returns the provenance, from git and the packages' pyproject.toml."""
    is_safe = project.may_run_code() or _has_harmless_configuration(project.root)
    return Provenance(find_revision(project.root) if is_safe else "", _declared_source(project.root))


def _has_harmless_configuration(root: Path) -> bool:
    """Whether git runs no program of the configuration. A repository from an archive may have any."""
    keys = _git(root, "config", "--local", "--no-includes", "--list", "--name-only") or ""
    return all(map(_HARMLESS.fullmatch, keys.lower().split("\n"))) if keys else False


def find_revision(root: Path) -> str:
    """Returns the last commit that changed an input, so that other commits leave images as they are.

    Installed definitions have it in a file. Empty if an input has changed since then, if none is committed, or
    without git. Empty also in a shallow clone that does not contain that commit: git would name the oldest commit that
    it has.
    """
    if root == INSTALLED and (recorded := root / REVISION).is_file():
        return recorded.read_text().strip()
    if (
        _git(root, "status", "--porcelain", "--untracked-files=normal", "--ignore-submodules=dirty", "--", *INPUTS)
        != ""
    ):
        return ""
    commit, *parents = (_git(root, "log", "-1", "--format=%H %P", "--", *INPUTS) or "").split() or [""]
    is_cut = not parents and _git(root, "rev-parse", "--is-shallow-repository") != "false"
    return "" if is_cut else commit


def _git(root: Path, *arguments: str) -> str | None:
    """Returns the output of git; None if it fails, is not installed, or has not ended after a minute."""
    # A hook sets these for its own repository, which may be another one.
    environment = {name: value for name, value in os.environ.items() if name not in ("GIT_DIR", "GIT_INDEX_FILE")}
    command = ["git", "--no-optional-locks", "-c", "log.showSignature=false", "-C", str(root), *arguments]
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        try:
            ended = subprocess.run(
                ["/bin/sh", "-c", _LIMITED, *command],
                env=environment,
                stdout=output,
                stderr=subprocess.DEVNULL,
                check=False,
                timeout=_PATIENCE,
            )
        except subprocess.TimeoutExpired:  # a repository may have a pipe in the place of a file
            return None
        output.seek(0)
        return None if ended.returncode else output.read().strip()


def _declared_source(root: Path) -> str:
    """Returns the first source URL among the project URLs of our packages; empty if there is none."""
    for package in ("checkpoint", "images", "library", "rehearsal", "toolkit"):
        path = root / package / "pyproject.toml"
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            if path.resolve().is_relative_to(root.resolve()):
                urls = tomllib.loads(read_file(path, MOST_RECORD, follow=True).decode())["project"]["urls"]
                for name, url in urls.items():
                    if name.lower() in ("source", "repository"):
                        return str(url)
    return ""


def make_oci_labels(
    base_name: str, base_digest: str, inherited: Mapping[str, str], provenance: Provenance
) -> dict[str, str]:
    """Returns the OCI labels that a Dockerfile cannot know.

    An unknown label is left out. If the base image has it (`inherited`), it is emptied: that value is about the base.
    """
    values = {
        "base.name": base_name,
        "base.digest": base_digest,
        "revision": provenance.revision,
        "source": provenance.source,
    }
    labels = {f"org.opencontainers.image.{name}": value for name, value in values.items()}
    return {name: value for name, value in labels.items() if value or inherited.get(name)}
