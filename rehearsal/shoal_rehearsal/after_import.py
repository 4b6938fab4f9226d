"""Calls a function right after a module has been imported for the first time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


def call_after_import(name: str, function: Callable[[], None]) -> None:
    """Calls a function once, after a module's code has run for the first time and before its import returns.

    Until then a finder is in sys.meta_path.

    Args:
        name: The module, which has not been imported yet.
        function: Its errors are raised by the import.
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
