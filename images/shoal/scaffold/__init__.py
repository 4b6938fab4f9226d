"""`shoal new`: writes a project to start from, which builds and trains at once. Templates of its files lie beside."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import jinja2

from shoal.errors import UsageError
from shoal.matrix.spec import ImageSpec

_NAME = re.compile(r"[a-z0-9]+(?:[._-][a-z0-9]+)*")
_FILES = {
    "Dockerfile.j2": "Dockerfile",
    "dockerignore.j2": ".dockerignore",
    "README.md.j2": "README.md",
    "test_train.py.j2": "test_train.py",
}


def write(directory: Path, image: ImageSpec) -> list[Path]:
    """Write a project for an image of its own on top of `image`, named as its directory; return the files.

    Raises UsageError for a name that no image can have, and where something is there already: nothing is
    overwritten.
    """
    name = directory.name
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot be an image's name: small letters and digits, with single '.', '_' or '-' between them,"
            " such as my-training"
        )
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"{directory}: is a file; expected a directory, new or empty. Choose another name")
    if directory.exists() and any(directory.iterdir()):
        raise UsageError(f"{directory}: is there already, and not empty. Choose another name, or remove it")
    directory.mkdir(parents=True, exist_ok=True)
    framework = "tensorflow" if image.framework == "tensorflow" else "torch"
    written = []
    for template, target in {**_FILES, f"train_{framework}.py.j2": "train.py"}.items():
        path = directory / target
        path.write_text(_render(template, name=name, image=image.tag))
        written.append(path)
    return written


def _render(template: str, **values: str) -> str:
    text = files(__name__).joinpath(template).read_text()
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False)
    return environment.from_string(text).render(**values)
