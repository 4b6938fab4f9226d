"""Checks the arguments of published interfaces: unknown names are errors with a hint, options without effect warn."""

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
    """Returns a hint for the end of a message, which starts with a space; empty if no known word is similar."""
    near = difflib.get_close_matches(word, list(known), 1)
    return f" Did you mean {near[0]!r}?" if near else ""


def refuse_unknown(function: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raises TypeError for the first unknown name; the message has the most similar known name, or all of them."""
    names = list(known)
    for name in given:
        if name not in names:
            hint = did_you_mean(name, names) or f" It has: {', '.join(names)}."
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}.{hint}")


def keyword_names(function: Callable[..., object]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != "self"]


def only_known(function: _Function) -> _Function:
    """Decorates a function without `**kwargs`: its TypeError for an unknown keyword argument gets a hint."""
    known = keyword_names(function)
    shown = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        refuse_unknown(shown, kwargs, known)
        return function(*args, **kwargs)

    return cast(_Function, checked)


def warn_without_effect(what: str, why: str) -> None:
    """Warns (UserWarning) that an option has no effect; only on the first rank of torchrun, `train` or mpirun."""
    if int(os.environ.get("RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0) == 0:
        warnings.warn(f"{what} has no effect: {why}.", stacklevel=3)
