"""Files to start from: `shoal new` writes a project for an image of your own, `shoal init` the image definitions.

The templates in this directory are for `shoal new`.
"""

from __future__ import annotations

import os
import re
import shutil
from importlib.resources import files
from pathlib import Path

import jinja2

from shoal import trust
from shoal.errors import UsageError
from shoal.matrix.project import find_shipped
from shoal.matrix.spec import ImageSpec

_NAME = re.compile(r"[a-z0-9]+(?:[._-][a-z0-9]+)*")
_FILES = {
    "Dockerfile.j2": "Dockerfile",
    "dockerignore.j2": ".dockerignore",
    "README.md.j2": "README.md",
    "test_train.py.j2": "test_train.py",
}

_IGNORED = ".cache/\n.env\n.venv/\njobs/\n"
"""The .gitignore of a project: results of jobs have logs, which may have passwords."""


def write_project(directory: Path, image: ImageSpec) -> list[Path]:
    """Creates a project for an image that extends another: a Dockerfile, a training script, a test and a README.

    The script uses TensorFlow if the image is one of TensorFlow, otherwise PyTorch. Missing directories are created.

    Args:
        directory: The project's directory, new or empty. Its name becomes the image's name.
        image: The image to extend.

    Returns:
        The files that were written.

    Raises:
        UsageError: If the name is not valid for an image, or the directory has files.
    """
    name = directory.name
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is not a valid image name. Fix: use lower-case letters and digits, with single '.', '_' or '-'"
            " between them, such as my-training"
        )
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"{directory}: is a file; expected a new or empty directory. Fix: choose another name")
    _check_own(directory)
    if directory.exists() and any(directory.iterdir()):
        raise UsageError(f"{directory}: exists and is not empty. Fix: choose another name, or remove it")
    directory.mkdir(parents=True, exist_ok=True)
    framework = "tensorflow" if image.framework == "tensorflow" else "torch"
    written = []
    for template, target in {**_FILES, f"train_{framework}.py.j2": "train.py"}.items():
        path = directory / target
        path.write_text(_render_template(template, name=name, image=image.tag))
        written.append(path)
    return written


def write_definitions(directory: Path) -> list[Path]:
    """Writes the image definitions that this package comes with, and returns their paths.

    `buildspec.yml` is written last: a directory with it is a project. A `.gitignore` leaves out caches, results of jobs
    and `.env`; one that is there stays. Raises `UsageError` if the directory has one of the other files already, or is
    a file.
    """
    shipped = find_shipped()
    copies = {source: directory / source.name for source in (shipped.templates, shipped.buildspec)}
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"{directory}: is a file; expected a directory. Fix: choose another name")
    _check_own(directory)
    if present := [path.name for path in copies.values() if os.path.lexists(path)]:  # also a link to nothing
        raise UsageError(f"{directory}: has {' and '.join(present)} already. Fix: name another directory")
    directory.mkdir(parents=True, exist_ok=True)
    ignored = directory / ".gitignore"
    written = []
    if not os.path.lexists(ignored):
        ignored.write_text(_IGNORED)
        written.append(ignored)
    for source, target in copies.items():
        if source.is_dir():
            shutil.copytree(source, target, copy_function=shutil.copyfile)
        else:
            shutil.copyfile(source, target)
    return [*written, *copies.values()]


def _check_own(directory: Path) -> None:
    """Raises `UsageError` if others could put links in the place of the files that are written to a directory."""
    if directory.exists() and (words := trust.find_stranger(directory)):
        raise UsageError(f"{directory}: {words}. Fix: choose a directory of your own")


def _render_template(template: str, **values: str) -> str:
    """Returns a template of this package, filled in. A variable without a value raises jinja2.UndefinedError."""
    text = files(__name__).joinpath(template).read_text()
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False)
    return environment.from_string(text).render(**values)
