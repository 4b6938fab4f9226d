"""Finds the blocks of code in tutorials and how-to pages with Sybil, and their marks.

The marks are `<!-- run with Docker -->` and `<!-- not run: REASON -->`.

A block of shell commands (`console`, `bash`) becomes commands, each with the output that the page shows. In `console`,
a command begins with `$ `. It goes on in the next line after a backslash or in open quotes.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from sybil import Document, Region, Sybil
from sybil.parsers.markdown.lexers import RawFencedCodeBlockLexer

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    {ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md"), *ROOT.glob("docs/migrate/*.md")}
    | {*ROOT.glob("examples/**/*.md")}
)
"""The pages with blocks to execute. Pages of docs/reference and docs/api are generated; docs/decisions has no tasks."""
SHELL, PYTHON = ("console", "bash"), ("python",)
NOT_CODE = ("", "text", "diff", "dockerfile", "jinja", "json", "toml", "yaml")
_MARK = re.compile(r"<!-- (?:not run: (?P<reason>[^\n]+)|(?P<docker>run with Docker)) -->\n+[ \t]*\Z")
_PROMPT = "$ "


class Command(NamedTuple):
    """A shell command, and the output that the page shows after it."""

    text: str
    output: str


class Block(NamedTuple):
    """A block of code. `reason` says why it is not run; empty: it is run, perhaps `with_docker`."""

    page: str
    line: int
    language: str
    source: str
    reason: str = ""
    with_docker: bool = False

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[Command]:
        """The commands of a block of shell. A `bash` block is one command, which fails if a command in it fails."""
        if self.language == "console":
            return list(_split_console(self.source))
        return [Command(f"(set -e\n{self.source})", "")]


def find_blocks(path: Path, root: Path = ROOT) -> list[Block]:
    """Returns the blocks of a page that are shell or Python.

    Args:
        path: The page.
        root: The directory from which the block's page is named.

    Raises:
        ValueError: If a block has a language that is in no list of this module, or commands without a language.
    """

    def parse(document: Document) -> Iterator[Region]:
        for region in RawFencedCodeBlockLexer(re.compile(r"(?P<language>[^\n]*)$\n", re.MULTILINE))(document):
            yield Region(region.start, region.end, region.lexemes, lambda example: None)

    document = Sybil([parse]).parse(path)
    found = []
    for example in document.examples():
        mark = _MARK.search(document.text[: example.region.start])
        block = Block(
            str(path.relative_to(root)),
            example.line,
            example.parsed["language"].strip(),
            str(example.parsed["source"]),
            (mark["reason"] or "") if mark else "",
            bool(mark and mark["docker"]),
        )
        if block.language in (*SHELL, *PYTHON):
            found.append(block)
        elif block.language not in NOT_CODE:
            raise ValueError(
                f"{block}: the language {block.language!r} is unknown. Fix: use {', '.join(SHELL + PYTHON)}"
            )
        elif not block.language and re.search(r"^\$ ", block.source, re.MULTILINE):
            raise ValueError(f"{block}: a block of commands has no language. Fix: write ```console")
    return found


def _split_console(source: str) -> Iterator[Command]:
    """Yields the commands of a `console` block. Raises ValueError if the block does not begin with one."""
    command, output = "", ""
    for line in source.splitlines(keepends=True):
        if command and _is_open(command):
            command += line
        elif line.startswith(_PROMPT):
            if command:
                yield Command(command, output)
            command, output = line.removeprefix(_PROMPT), ""
        elif command:
            output += line
        else:
            raise ValueError(f"the first line does not begin with '$ ': {line}")
    yield Command(command, output)


def _is_open(command: str) -> bool:
    """Whether the next line belongs to the command too."""
    if command.endswith("\\\n"):
        return True
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return True
    return False
