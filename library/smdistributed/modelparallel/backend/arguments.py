"""Arguments of the published interface: unknown names are errors, and what is accepted without effect warns."""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import warnings
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

_Function = TypeVar("_Function", bound=Callable[..., Any])


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint that begins with a space, for the end of a message; empty if nothing that is known looks like `word`."""
    near = difflib.get_close_matches(word, list(known), 1)
    return f" Did you mean {near[0]!r}?" if near else ""


def strict(function: _Function) -> _Function:
    """Decorates a function without `**kwargs`, so that its TypeError for an unknown keyword argument has a hint."""
    parameters = [name for name in inspect.signature(function).parameters if name != "self"]
    shown = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in parameters:
                hint = did_you_mean(name, parameters) or f" It has: {', '.join(parameters)}."
                raise TypeError(f"{shown}() got an unexpected keyword argument {name!r}.{hint}")
        return function(*args, **kwargs)

    return cast(_Function, checked)


def warn_without_effect(what: str, why: str) -> None:
    """Warns, on the first rank alone, that what the script asks for has no effect. why: a sentence without its end."""
    if int(os.environ.get("RANK") or 0) == 0:
        warnings.warn(f"{what} has no effect: {why}.", stacklevel=2)
