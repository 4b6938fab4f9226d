"""The words after `train`: its own options, and the script's arguments."""

from __future__ import annotations

from collections.abc import Sequence

from shoal_toolkit.errors import ContractError
from shoal_toolkit.light_typing import NamedTuple

EXPLAIN, JSON, REHEARSE = "--explain", "--json", "--rehearse"
# How many letters a word may be away from an option, and be a slip of it. (`--reverse` is two away from --rehearse.)
_SLIPS = {EXPLAIN: 2, REHEARSE: 1}


class Words(NamedTuple):
    """What the words ask for."""

    explains: bool
    as_json: bool
    rehearses: bool
    arguments: list[str]  # for the script


def read(words: Sequence[str]) -> Words:
    """Read the words. Our options count wherever they stand before `--`; --json right after --explain.

    Raises ContractError for a slip of one of them: the job would run, and was only to be explained.
    """
    own: set[str] = set()
    arguments: list[str] = []
    before = ""
    for index, word in enumerate(words):
        if word == "--":
            # With arguments before it, it is the script's own.
            arguments += words[index + bool(not arguments) :]
            break
        if word in _SLIPS or (word == JSON and before == EXPLAIN):
            own.add(word)
        else:
            _refuse_slip(word)
            arguments.append(word)
        before = word
    return Words(EXPLAIN in own, JSON in own, REHEARSE in own, arguments)


def _refuse_slip(word: str) -> None:
    name, _, value = word.partition("=")
    stem = name.lstrip("-\u2013\u2014").lower()  # a dash of a text editor is one too
    if stem == name.lower():
        return  # no option
    for option, most in _SLIPS.items():
        letters = option.lstrip("-")
        if stem[:1] == letters[0] and _distance(stem, letters) <= most:
            takes = f" {option} takes no value." if stem == letters and value else ""
            raise ContractError(
                f"{word!r} is no option of `train`. Did you mean {option!r}?{takes} Fix: if it is the script's own, "
                f"write it after `--`: train -- {word}"
            )


def _distance(left: str, right: str) -> int:
    """Return how many letters to add, leave out, replace or swap with the next one make one word of the other."""
    if abs(len(left) - len(right)) > max(_SLIPS.values()):
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
