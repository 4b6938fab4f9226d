"""The files of a report: a page, and what stands beside it; also those of others that a command has `-o` for."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from shoal.errors import DiskError, UsageError, is_disk_full


def targets(output: Path, as_json: bool, read: Sequence[Path]) -> list[Path]:
    """Return the files to write, the page first, then what `--json` asks for.

    Raises `UsageError` for what could not be written in the end, and for what is `read` or written twice.
    """
    if output.is_dir():
        raise UsageError(f"-o {output}: cannot be written: it is a directory. Name a file in it")
    written = [output, output.with_suffix(".json")] if as_json else [output]
    if len(set(written)) < len(written) or any(path.resolve() == other.resolve() for path in written for other in read):
        raise UsageError(f"-o {output}: the page would write over another file: choose another name, such as page.html")
    for path in written:
        parent = path.parent
        if not parent.is_dir():
            raise UsageError(
                f"-o {output}: {path} cannot be written: {parent} is no directory. Make it: mkdir -p {parent}"
            )
        if not os.access(path if path.exists() else parent, os.W_OK):
            raise UsageError(f"-o {output}: {path} cannot be written: permission denied. Choose another directory")
    return written


def write(output: Path, texts: Mapping[Path, str]) -> None:
    """Write the texts. Raises `UsageError`, or `DiskError` for a full one, naming the option and the file."""
    for path, text in texts.items():
        try:
            _write(path, text)
        except OSError as error:
            kind = DiskError if is_disk_full(error) else UsageError
            raise kind(f"-o {output}: {path} cannot be written: {error.strerror}. Choose another place") from error


def _write(path: Path, text: str) -> None:
    """Write a file; a new one that an error or an interrupt cuts off does not stay."""
    was_there = path.exists()
    try:
        path.write_text(text, encoding="utf-8")
    except BaseException:
        if not was_there:
            path.unlink(missing_ok=True)
        raise
