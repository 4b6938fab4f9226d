"""The source trees of our packages for publishing: with the licence, URLs and, in `shoal`, the image definitions."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from shoal.matrix.project import INSTALLED, Project
from shoal.sources import packages, provenance

PUBLISHED = ("images", *packages.PACKAGES)
"""The packages that `make wheels` builds: directories of the checkout."""
_SHOAL = ("images/pyproject.toml", "images/README.md")
_BUNDLE = ("LICENSE", "requirements/shoal.txt", *_SHOAL)
"""With these, an installed `shoal bundle` makes a wheel of `shoal`."""
_DEFINITIONS = (".gitignore", "buildspec.yml", "dockerfiles", "scripts/engine.sh", *packages.PACKAGES)


def write_source_tree(project: Project, package: str, directory: Path, url: str = "") -> None:
    """Writes a package's files to a new directory, in which a build backend makes its sdist and wheel.

    Files that git ignores are left out, such as compiled ones. `shoal` is the code that runs now.

    Args:
        project: A checkout, or the installed definitions.
        package: One of PUBLISHED.
        directory: It is created.
        url: The address of the repository. It becomes the project URL `Source`; empty for none.
    """
    directory.mkdir(parents=True)
    if package == "images":
        for name in _SHOAL:
            shutil.copy(project.root / name, directory)
        code = INSTALLED.parent
        for path in code.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts and INSTALLED not in path.parents:
                _copy(path, directory / "shoal" / path.relative_to(code))
        _write_definitions(project, directory / "shoal" / INSTALLED.name)
    else:
        for path in _list_files(project, package):
            _copy(path, directory / path.relative_to(project.root / package))
    shutil.copy(project.root / "LICENSE", directory)
    if url:
        with (directory / "pyproject.toml").open("a") as file:
            file.write(f'\n[project.urls]\nSource = "{url}"\n')


def _write_definitions(project: Project, directory: Path) -> None:
    """Writes the image definitions, all that builds read, with the commit that they are from if it is known."""
    for path in _list_files(project, *_DEFINITIONS, *_BUNDLE):
        _copy(path, directory / path.relative_to(project.root))
    if revision := provenance.find_revision(project.root):
        (directory / provenance.REVISION).write_text(f"{revision}\n")


def _list_files(project: Project, *names: str) -> Iterator[Path]:
    """Yields files and all files in directories of the project, without those that git ignores."""
    from pathspec import GitIgnoreSpec  # of hatchling

    ignored = GitIgnoreSpec.from_lines((project.root / ".gitignore").read_text().splitlines())
    for start in (project.root / name for name in names):
        for path in [start] if start.is_file() else sorted(start.rglob("*")):
            if path.is_file() and not ignored.match_file(path.relative_to(project.root)):
                yield path


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)
