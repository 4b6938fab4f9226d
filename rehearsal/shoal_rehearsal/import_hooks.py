"""Hooks into imports: a call right after a framework's import, and replacements for modules that are not installed.

Replacements, such as Horovod's, come from other packages.

A package declares an entry point in the group `shoal_rehearsal.replacements`. Its name is a top-level package, and its
object a function: it takes the name of a module and returns the name of the module to use instead, or None.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint, distributions
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

from shoal_rehearsal.settings import is_enabled, read_settings


def call_after_import(name: str, function: Callable[[], None]) -> None:
    """Calls a function once, after a module's code has run for the first time and before its import returns.

    The module must not have been imported yet; until then a finder is in sys.meta_path. The import raises the
    function's errors.
    """
    sys.meta_path.insert(0, _WatchedImport(name, function))


class _WatchedImport:
    """Finds the module with the other finders, and extends its loader, which then calls `function`.

    It stays in sys.meta_path until the module is imported: many libraries look for a module without importing it.
    """

    def __init__(self, name: str, function: Callable[[], None]) -> None:
        self._name = name
        self._function = function

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        others = (
            finder.find_spec(name, path, target)
            for finder in sys.meta_path
            if finder is not self and hasattr(finder, "find_spec")
        )
        spec = next((spec for spec in others if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._extend(spec.loader)
        return spec

    def _extend(self, loader: object) -> None:
        """Replaces `exec_module`: after the module's code, it calls the function and leaves sys.meta_path."""
        execute: Callable[[ModuleType], None] = loader.exec_module  # type: ignore[attr-defined]

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._function()

        loader.exec_module = exec_module  # type: ignore[attr-defined]


GROUP = "shoal_rehearsal.replacements"


class ReplacementFinder(Loader):
    """Imports a replacement when all other finders have failed, so that an installed module is found first."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns a spec for a declared replacement. Raises RehearsalError if SHOAL_REHEARSE is invalid."""
        top = name.partition(".")[0]
        if top not in _declared() or not is_enabled() or (name != top and _find_replacement(name) is None):
            return None
        return spec_from_loader(name, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        """Makes attributes come from the replacement, if any. Rank 0 prints that the module is not installed."""
        name = module.__name__
        replacement = _find_replacement(name)
        if replacement is None:  # the top-level package
            return
        module.__getattr__ = _look_up(name)  # type: ignore[method-assign]
        if read_settings().prints_notice:
            library = replacement.partition(".")[0]
            print(f"SHOAL REHEARSAL: {name} is not installed; {library} replaces it.", file=sys.stderr)


def _look_up(module: str) -> Callable[[str], Any]:
    """Returns a module's `__getattr__`: it chooses the replacement when the script uses a name, after its imports."""

    def get_attribute(name: str) -> Any:
        replacement = None if name.startswith("__") else _find_replacement(module)
        if replacement is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        found = import_module(replacement)
        if name not in found.__all__:
            raise AttributeError(
                f"The replacement for {module} in a rehearsal has no {name!r}, only {', '.join(found.__all__)}. "
                f"Fix: install {module.partition('.')[0]}, or leave the name out."
            )
        return getattr(found, name)

    return get_attribute


def _find_replacement(module: str) -> str | None:
    find: Callable[[str], str | None] = _declared()[module.partition(".")[0]].load()
    return find(module)


@functools.cache
def _declared() -> dict[str, EntryPoint]:
    points = (point for installed in distributions() for point in installed.entry_points if point.group == GROUP)
    return {point.name: point for point in points}
