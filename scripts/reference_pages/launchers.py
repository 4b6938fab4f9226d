"""docs/reference/launchers.md: the commands of `smdistributed`, from their parsers."""

from __future__ import annotations

from collections.abc import Iterator

from reference_pages.markdown import code, page, table, wrap
from smdistributed.core.commands import OPTIONS, TASKS

_HEAD = """# `smddprun` and other commands of ranks

`make reference` writes this page from the commands. SageMaker's own toolkit and published scripts use them if they are
on `PATH`. Under `train` you do not need them. A command replaces itself by the command of the rank, and keeps its
process ID. Exit code 2 means that an option or the launch environment is invalid. Exit code 127 means that the command
does not exist, and 126 that it can't be started."""


def write() -> str:
    """Returns the page."""
    return page(_HEAD, *(part for name in OPTIONS for part in _describe(name)))


def _describe(name: str) -> Iterator[str]:
    rows = (
        (code(f"{option} {value}".strip()), f"{text[:1].upper()}{text[1:]}.") for option, value, text in OPTIONS[name]
    )
    yield f"## {name}"
    yield wrap(TASKS[name])
    yield table(("option", "meaning"), rows)
