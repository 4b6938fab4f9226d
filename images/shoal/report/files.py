"""The files of a report: a page, and what stands beside it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from shoal.errors import UsageError


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
    """Write the texts. Raises `UsageError`, naming the option, for one that cannot be written."""
    for path, text in texts.items():
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"-o {output}: {path} cannot be written: {error.strerror}") from error
