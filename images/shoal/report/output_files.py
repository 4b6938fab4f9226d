"""The files of a report: an HTML page, a JSON file next to it, or another output file of a command.

Checks that they can be written, renders pages from templates, and writes the files.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2

from shoal.clean_text import clean_text
from shoal.errors import DiskError, UsageError, is_disk_full


def choose_files(output: Path, as_json: bool, read: Sequence[Path]) -> list[Path]:
    """Returns the files that a report writes: the page, and with `as_json` a JSON file next to it.

    Args:
        output: The value of `-o`.
        as_json: Whether there is a JSON file.
        read: The files that the report reads.

    Raises:
        UsageError: If a file cannot be written, or would overwrite another one of the report or one that it reads.
    """
    if output.is_dir():
        raise UsageError(f"-o {output}: is a directory. Fix: name a file in it")
    written = [output, output.with_suffix(".json")] if as_json else [output]
    if len(set(written)) < len(written) or any(path.resolve() == other.resolve() for path in written for other in read):
        raise UsageError(
            f"-o {output}: would overwrite another file of the report. Fix: choose a name such as page.html"
        )
    for path in written:
        parent = path.parent
        # A project that was copied from elsewhere may have a link in the place of a report.
        if path.is_symlink() and not path.absolute().is_relative_to("/dev"):
            raise UsageError(f"-o {output}: {path} is a link. Fix: remove it, or name the file that it leads to")
        if not parent.is_dir():
            raise UsageError(f"-o {output}: {parent} is not a directory. Fix: mkdir -p {parent}")
        if not os.access(path if path.exists() else parent, os.W_OK):
            raise UsageError(f"-o {output}: {path}: permission denied. Fix: choose another directory")
    return written


def write_files(output: Path, texts: Mapping[Path, str], mode: int = 0o666) -> None:
    """Writes texts to files.

    Args:
        output: The value of `-o`, which errors name.
        texts: The text of each file.
        mode: The most permissions of the files.

    Raises:
        DiskError: If the disk is full.
        UsageError: If a file cannot be written for another reason.
    """
    for path, text in texts.items():
        try:
            _write(path, text, mode)
        except OSError as error:
            kind = DiskError if is_disk_full(error) else UsageError
            raise kind(f"-o {output}: {path} cannot be written: {error.strerror}. Fix: choose another path") from error


def render_page(template: str, **values: object) -> str:
    """Returns an HTML page, rendered from a template of this package.

    Values are escaped for HTML, and no text hides or turns around a part of itself.
    Raises jinja2.UndefinedError if the template uses a value that is not given.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("shoal.report", "."),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return clean_text(environment.get_template(template).render(**values))


def _write(path: Path, text: str, mode: int) -> None:
    """Writes a file. A new one is removed after an error or an interrupt. A pipe without a reader is an error."""
    existed = path.exists()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, mode)
        os.set_blocking(descriptor, True)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
    except BaseException:
        if not existed:
            path.unlink(missing_ok=True)
        raise
