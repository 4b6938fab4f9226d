"""Parts of Markdown pages."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

WIDTH = 120


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table. A `|` in a cell is escaped, and line breaks become spaces.

    Args:
        head: The heading of each column.
        rows: The cells of each row.
    """
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |".replace("  ", " ") for line in lines)


def code(value: object) -> str:
    """Returns a value as code; nothing for an empty text."""
    text = str(value)
    return f"`{text}`" if text else ""


def page(*parts: str) -> str:
    """Returns a page of these parts, with an empty line between them."""
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def wrap(text: str) -> str:
    """Returns a paragraph in lines of at most 120 characters."""
    return textwrap.fill(" ".join(text.split()), WIDTH, break_long_words=False, break_on_hyphens=False)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
