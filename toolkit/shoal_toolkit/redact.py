"""Keeps secrets out of what is printed and written: values whose name says that they are one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_SECRET = re.compile(
    r"secret|token(?!i|s)|passw|credential|private|api[-_]?key|access[-_]?key|auth(?!or)|\bkey\b|[-_]key$",
    re.IGNORECASE,
)
_ALSO_TEXTS = ("SM_HPS", "SM_TRAINING_ENV", "SM_USER_ARGS")  # they repeat every hyperparameter in one string
MASK = "******"


def is_secret(name: str) -> bool:
    """Whether a variable or option of this name is likely to hold a secret."""
    return _SECRET.search(name) is not None


def arguments(argv: Iterable[str]) -> list[str]:
    """Return argv with the values of options and variables named like secrets masked."""
    shown: list[str] = []
    hide_next = False
    for word in argv:
        name, equals, _ = word.partition("=")
        if hide_next:
            shown.append(MASK)
        elif equals and is_secret(name):
            shown.append(f"{name}={MASK}")
        else:
            shown.append(word)
        hide_next = not hide_next and word.startswith("-") and not equals and is_secret(word)
    return shown


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with the values of those named like secrets masked, wherever they are repeated."""
    hidden = {value for name, value in variables.items() if is_secret(name) and value}
    shown = {}
    for name, value in variables.items():
        if is_secret(name):
            shown[name] = MASK if value else value
        elif name in _ALSO_TEXTS:
            shown[name] = _without(value, hidden)
        else:
            shown[name] = value
    return shown


def _without(text: str, hidden: Iterable[str]) -> str:
    for value in sorted(hidden, key=len, reverse=True):
        text = text.replace(value, MASK)
    return text
