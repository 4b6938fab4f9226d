"""Cleans text that a job, an image, a file name, YAML or another program brought, and prints it.

All output of commands goes through this module or `shoal.console`. So no text can control a terminal, hide a part of
itself, or look like a line of Shoal. tests/images/test_clean_text.py checks that nothing else prints.
"""

from __future__ import annotations

import itertools
import re
import sys
import unicodedata

MOST_IN_LINE = 4_096
"""Characters of a line of a job's log. A terminal needs seconds for a line of megabytes."""
_MOST_IN_MESSAGE = 20_000  # characters of a line: our own messages list hundreds of tags
_MOST_LINES = 500  # of a message: the text of a job can have millions
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Printable for Python, and yet invisible: fillers, an empty pattern of Braille, separators of Mongolian and Khmer.
_BLANK = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\uffa0\U00016fe4\U0001d159")
_SELECTORS = range(0xE0100, 0xE01F0)  # of variants: 240 invisible letters, which can hold a text
_MOST_MARKS = 4  # on a letter: more cover the lines above it
_MARKS = ("Mn", "Me")
_SIGNS = re.compile(r"[^\w\x00-\u02ff]{5,}")  # no letters and digits of any script: among them are the marks
COLORS = re.compile(r"\x1b\[[0-9;:]*m")
_ATTRIBUTES = re.compile(r"[345]8[;:](?:5[;:]\d*|2(?:[;:]\d*){3})|\d+")
"""Colours with their numbers, and other attributes of letters."""
_CONCEAL = 8  # the attribute that hides letters
_CONTROLS = re.compile(r"\x1b\[(?![0-9;:]*m)[0-9;?<=>]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[^\[]")


class _Replacements(dict[int, str]):
    """The character that replaces each code point, found when it is first needed."""

    def __missing__(self, code: int) -> str:
        char = chr(code)
        if char == "\n" or (char.isprintable() and char not in _BLANK and code not in _SELECTORS):
            self[code] = char
        else:
            # Spaces of other widths are common in texts. Other ends of a line are not.
            is_space = char == "\t" or (char.isspace() and char > "\x9f" and char not in "\u2028\u2029")
            self[code] = " " if is_space else _REPLACEMENT
        return self[code]


_replacements = _Replacements()


def clean_text(text: str) -> str:
    """Returns a text without characters that control a terminal, hide or turn text around; line ends stay.

    Controls, format characters (also of bidirectional text), surrogates and invisible letters become U+FFFD, and tabs
    and wide spaces become spaces.
    """
    if text.isascii() and text.isprintable():
        return text
    return _SIGNS.sub(_cut_marks, text.translate(_replacements))


def _cut_marks(found: re.Match[str]) -> str:
    kept, marks = [], 0
    for char in found[0]:
        marks = marks + 1 if unicodedata.category(char) in _MARKS else 0
        if marks <= _MOST_MARKS:
            kept.append(char)
    return "".join(kept)


def clean_message(text: str) -> str:
    """Returns a clean text for one message: further lines are indented, so they do not look like lines of Shoal."""
    *lines, rest = clean_text(text).split("\n", _MOST_LINES)
    last = rest if "\n" not in rest else f"… ({rest.count(chr(10)) + 1:,} lines more)"
    return "\n  ".join(cut_line(line, _MOST_IN_MESSAGE) for line in (*lines, last))


def clean_log_line(text: str) -> str:
    """Returns a line that changes nothing but its own row of a terminal: colours stay, and other controls do not."""
    text = cut_line(text)
    if text.isascii() and text.isprintable():
        return text
    text = _CONTROLS.sub("", text.expandtabs().replace("\n", " "))
    colors = ["" if _conceals(color) else color for color in COLORS.findall(text)]
    pieces = map(clean_text, COLORS.split(text))
    if not colors:
        return "".join(pieces)
    return "".join(map("".join, itertools.zip_longest(pieces, colors, fillvalue=""))) + "\x1b[0m"


def _conceals(color: str) -> bool:
    return any(code.isdecimal() and int(code) == _CONCEAL for code in _ATTRIBUTES.findall(color))


def cut_line(text: str, most: int = MOST_IN_LINE) -> str:
    """Returns a line without its end if it is very long."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text) - most} characters more)"


def print_error(text: str) -> None:
    """Prints a message of Shoal on standard error."""
    print(f"shoal: {clean_message(text)}", file=sys.stderr)


def print_document(text: str, end: str = "\n") -> None:
    """Prints a document for programs on standard output. On a terminal it is cleaned; elsewhere it stays unchanged.

    Only lone surrogates are always replaced, as they cannot be encoded.
    """
    print(clean_text(text) if sys.stdout.isatty() else _encodable(text), end=end)


def print_log_line(text: str, flush: bool = False) -> None:
    """Prints a line of a job's log on standard output. On a terminal it is cleaned; elsewhere it stays unchanged."""
    sys.stdout.write((clean_log_line(text) if sys.stdout.isatty() else _encodable(text)) + "\n")
    if flush:
        sys.stdout.flush()


def _encodable(text: str) -> str:
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
