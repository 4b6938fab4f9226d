"""Parses the command line of `train`: its own options, and arguments for the script."""

from __future__ import annotations

from collections.abc import Sequence

from shoal_toolkit.errors import ContractError
from shoal_toolkit.fast_typing import NamedTuple

EXPLAIN, JSON, REHEARSE, PREFLIGHT = "--explain", "--json", "--rehearse", "--preflight"
# How many letters of a misspelt option may be wrong. (`--reverse` differs from --rehearse by two.)
_MAX_WRONG_LETTERS = {EXPLAIN: 2, REHEARSE: 1, PREFLIGHT: 2}


class CommandLine(NamedTuple):
    """The options of `train`, and the arguments for the script."""

    explains: bool
    as_json: bool
    rehearses: bool
    preflights: bool
    arguments: list[str]


def parse_command_line(words: Sequence[str]) -> CommandLine:
    """Parses the words after `train`.

    Its options may be anywhere before `--`; `--json` is one only right after `--explain`.

    All other words, and all words after `--`, are arguments for the script. If arguments precede it, `--` is one too.

    Raises:
        ContractError: If an option is misspelt. Otherwise the job would run although it was only to be explained.
    """
    own: set[str] = set()
    arguments: list[str] = []
    before = ""
    for index, word in enumerate(words):
        if word == "--":
            # After other arguments, the `--` itself is the script's.
            arguments += words[index + bool(not arguments) :]
            break
        if word in _MAX_WRONG_LETTERS or (word == JSON and before == EXPLAIN):
            own.add(word)
        else:
            _refuse_misspelt_option(word)
            arguments.append(word)
        before = word
    return CommandLine(EXPLAIN in own, JSON in own, REHEARSE in own, PREFLIGHT in own, arguments)


def _refuse_misspelt_option(word: str) -> None:
    """Raises ContractError if a word is nearly --explain, --rehearse or --preflight, or one of them with a value."""
    name, _, value = word.partition("=")
    stem = name.lstrip("-\u2013\u2014").lower()  # text editors replace -- by a long dash
    if stem == name.lower():
        return  # not an option
    for option, most in _MAX_WRONG_LETTERS.items():
        letters = option.lstrip("-")
        if stem[:1] == letters[0] and _edit_distance(stem, letters) <= most:
            takes = f" {option} takes no value." if stem == letters and value else ""
            raise ContractError(
                f"{word!r} is not an option of `train`. Did you mean {option!r}?{takes} Fix: if it is an option of the "
                f"script, write it after `--`: train -- {word}"
            )


def _edit_distance(left: str, right: str) -> int:
    """Counts letters that are added, missing, replaced or swapped; wrong if the lengths differ by 3 or more."""
    if abs(len(left) - len(right)) > max(_MAX_WRONG_LETTERS.values()):
        return len(right)
    rows: list[list[int]] = [list(range(len(right) + 1))]
    for i, letter in enumerate(left, 1):
        row = [i]
        for j, other in enumerate(right, 1):
            least = min(rows[-1][j] + 1, row[j - 1] + 1, rows[-1][j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == right[j - 2] and left[i - 2] == other:
                least = min(least, rows[-2][j - 2] + 1)
            row.append(least)
        rows.append(row)
    return rows[-1][-1]
