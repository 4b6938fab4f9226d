"""Arguments that have no meaning: unknown names are refused, and names without an effect are reported."""

from __future__ import annotations

import difflib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])
_reported: set[str] = set()


def refuse_unknown(function: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError for the first name that is not known; it names the closest one, or all."""
    names = sorted(known)
    for name in given:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]}?" if close else f"it takes {', '.join(names)}."
            raise TypeError(f"{function}() has no argument {name!r}: {hint}")


def names_of(function: Callable[..., object]) -> set[str]:
    """The arguments that a function takes by name."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != "self"}


def only_known(function: Function) -> Function:
    """Decorate a function, or a constructor, so that its TypeError for an unknown argument says "did you mean"."""
    name = function.__qualname__.removesuffix(".__init__")
    known = names_of(function)

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        refuse_unknown(name, kwargs, known)
        return function(*args, **kwargs)

    return cast("Function", checked)


def warn_without_effect(argument: str, why: str) -> None:
    """Warn (UserWarning), once in this process, that something is accepted and has no effect."""
    if argument not in _reported:
        _reported.add(argument)
        warnings.warn(f"{argument} has no effect: {why}", stacklevel=3)
