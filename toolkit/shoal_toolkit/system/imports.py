"""Lets the ranks of a job import their framework without garbage collections.

`import torch` makes 250,000 objects that stay. Python collects garbage again and again meanwhile, and goes through all
of them once more when it ends. `make bench-launch` measures both, as `rank-with-ddp`. `shoal-toolkit.pth` calls
`activate` when Python starts in a job.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from shoal_toolkit.light_typing import Any

_FRAMEWORKS = ("torch", "tensorflow")
_PAUSED = (*_FRAMEWORKS, "torch._dynamo")  # DistributedDataParallel imports the last one, when a script has objects


def activate() -> None:
    """Extends sys.meta_path: imports of frameworks pause the garbage collector. Nothing if SHOAL_FAST_IMPORTS is 0."""
    if os.environ.get("SHOAL_FAST_IMPORTS") != "0":
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds a framework with the other finders, and extends its loader."""

    def __init__(self) -> None:
        self._searched: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns a framework's spec; None for other modules, and if another finder asks this one in turn."""
        if name not in _PAUSED or name in self._searched:
            return None
        self._searched.add(name)
        try:
            found = (finder.find_spec(name, path, target) for finder in sys.meta_path if hasattr(finder, "find_spec"))
            spec = next((spec for spec in found if spec is not None), None)
        finally:
            self._searched.remove(name)
        loader: Any = spec and spec.loader
        if hasattr(loader, "exec_module"):
            loader.exec_module = _without_collections(loader.exec_module)
        return spec


def _without_collections(execute: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    """Returns the function so that it runs with the garbage collector paused.

    The objects of a framework are then left out of all collections. Python has no way to leave out only them: an
    object of the script is left out too if it was made before. It is still freed with its last reference.
    """

    def exec_module(module: ModuleType) -> None:
        if not gc.isenabled():  # in another framework's import, or the script has turned it off
            execute(module)
            return
        gc.disable()
        try:
            execute(module)
        finally:
            gc.enable()
        if module.__name__ in _FRAMEWORKS:
            gc.freeze()

    return exec_module
