"""Edits the text of YAML files, so that all else stays as people wrote it, such as comments and line breaks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from shoal.errors import SpecError


def replace_words(path: Path, words: Mapping[str, str], *, required: bool = True) -> None:
    """Replaces values in a file, but not in its comments. Raises `SpecError` if it lacks a value that is `required`."""
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(_replace(path, 1, lines, words if required else _present(lines, words))))


def edit_entry(path: Path, line: int, words: Mapping[str, str], *, beside: bool = False, system: str = "") -> None:
    """Replaces values in an entry of a list. Raises `SpecError` if the entry lacks one.

    Args:
        path: The file.
        line: The first line of the entry, counted from 1.
        words: The values, or keys and values.
        beside: Leave the entry as it is, and add an edited copy after it.
        system: The system that the copy names in `systems`.
    """
    lines = path.read_text().splitlines(keepends=True)
    end = _find_end(lines, line - 1)
    new = _replace(path, line, lines[line - 1 : end], {old: word for old, word in words.items() if old != word})
    if system:
        new = _set_system(new, system)
    if beside:
        new = [*lines[line - 1 : end], *([] if lines[line - 1].lstrip("- ").startswith("{") else ["\n"]), *new]
    path.write_text("".join([*lines[: line - 1], *new, *lines[end:]]))


def _find_end(lines: list[str], start: int) -> int:
    """Returns the number of lines up to the end of an entry, without the blank lines and comments after it."""
    end = start + 1
    for number, line in enumerate(lines[start + 1 :], start + 1):
        if _is_content(line):
            if _indent(line) <= _indent(lines[start]):
                break
            end = number + 1
    return end


def _replace(path: Path, first: int, lines: list[str], words: Mapping[str, str]) -> list[str]:
    for old in words:
        if not _present(lines, {old: ""}):
            raise SpecError(
                f"{path}:{first}: cannot be edited: {old!r} is not written in one piece. Fix: write"
                f" {words[old]} there, and then shoal lock"
            )
    return [
        _pattern(words).sub(lambda match: words[match[0]], line) if words and _is_content(line) else line
        for line in lines
    ]


def _present(lines: list[str], words: Mapping[str, str]) -> dict[str, str]:
    text = "".join(filter(_is_content, lines))
    return {old: new for old, new in words.items() if _pattern({old: new}).search(text)}


def _pattern(words: Mapping[str, str]) -> re.Pattern[str]:
    """Returns a pattern of whole words: a tag is not the beginning of a longer one."""
    longest = sorted(map(re.escape, words), key=len, reverse=True)
    return re.compile(rf"(?<![\w.+-])(?:{'|'.join(longest)})(?![\w.+-])")


def _set_system(lines: list[str], system: str) -> list[str]:
    text = "".join(lines)
    if re.search(r"\bsystems: ", text):
        return [re.sub(r"\bsystems: \[[^]]*\]", f"systems: [{system}]", text)]
    gap = ", " if lines[0].lstrip("- ").startswith("{") else "\n" + " " * (_indent(lines[0]) + 2)
    return [re.sub(r"(\bversion: [\w.]+)", rf"\1{gap}systems: [{system}]", text, count=1)]


def _is_content(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
