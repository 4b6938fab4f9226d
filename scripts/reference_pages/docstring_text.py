"""Docstrings as Markdown."""

from __future__ import annotations

import re
import textwrap

_PARAMETERS = re.compile(r"^(\w+(?:, \w+)*): ")
_ENTRY = re.compile(r"^(\*{0,2}[\w.]+(?:, \*{0,2}[\w.]+)*)(?: \([^)]*\))?: ", re.MULTILINE)


def prose(text: str) -> str:
    """A docstring as Markdown: its sections become lists."""
    head, *sections = re.split(r"^(?=(?:Args|Attributes|Returns|Yields|Raises|Examples?):$)", text, flags=re.MULTILINE)
    return "\n\n".join(part for part in (_paragraphs(head.rstrip()), *map(_section, sections)) if part)


def _section(text: str) -> str:
    """A section such as `Args:` with its indented body, as Markdown."""
    heading, _, body = text.partition("\n")
    body, name = textwrap.dedent(body).strip(), heading.rstrip(":")
    if name.startswith("Example"):
        return f"{heading}\n\n```python\n{body}\n```"
    if name in ("Args", "Attributes", "Raises") and _ENTRY.match(body):
        items = re.split(r"\n(?=\S)", body)
        return f"{heading}\n\n" + "\n".join(
            _ENTRY.sub(_item, re.sub(r"\n\s*", "\n  ", each), count=1) for each in items
        )
    return f"{heading} {' '.join(body.split())}" if "\n\n" not in body else f"{heading}\n\n{body}"


def _item(entry: re.Match[str]) -> str:
    return f"- {', '.join(f'`{name}`' for name in entry[1].split(', '))}: "


def _paragraphs(text: str) -> str:
    """Text before the sections. Lines that begin with parameters become a list."""
    lines: list[str] = []
    in_list = False
    for line in text.splitlines():
        found = _PARAMETERS.match(line)
        if found and (in_list or not lines[-1:] or not lines[-1]):
            names = ", ".join(f"`{name}`" for name in found[1].split(", "))
            line, in_list = f"- {names}: {line[found.end() :]}", True
        elif in_list and line.startswith(" "):
            line = f"  {line.strip()}"
        else:
            in_list = False
        lines.append(line)
    return "\n".join(lines)
