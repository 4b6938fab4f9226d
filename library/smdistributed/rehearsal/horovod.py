"""Horovod for TensorFlow where it is not installed: published scripts import it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

from smdistributed.rehearsal.settings import is_asked_for, read_settings

_STAGES = "smdistributed.modelparallel.tensorflow"
_RANKS = "smdistributed.dataparallel.tensorflow"
_STAND_INS = {
    "horovod": "",
    "horovod.keras": f"{_RANKS}.horovod.keras",
    "horovod.tensorflow": f"{_RANKS}.horovod",
    "horovod.tensorflow.keras": f"{_RANKS}.horovod.keras",
    "horovod.tensorflow.keras.callbacks": f"{_RANKS}.keras.callbacks",
}


class Finder(Loader):
    """Asked after all others, so that one that is installed is found first.

    A name is looked up when the script uses it: by then it has imported the library for model parallelism, or never
    will.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _STAND_INS or not is_asked_for():
            return None
        return spec_from_loader(name, self, is_package=name != "horovod.tensorflow.keras.callbacks")

    def exec_module(self, module: ModuleType) -> None:
        """Prints, on rank 0, once for each of the modules, that it is not Horovod."""
        name = module.__name__
        if name == "horovod":
            return
        module.__getattr__ = _look_up(name)  # type: ignore[method-assign]
        if read_settings().tells:
            print(
                f"SHOAL REHEARSAL: {name} is not installed; functions of smdistributed stand in for it.",
                file=sys.stderr,
            )


def _look_up(module: str) -> Callable[[str], Any]:
    def found(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        stand_in = import_module(_stand_in(module))
        if name not in stand_in.__all__:
            raise AttributeError(
                f"The stand-in for {module} in a rehearsal has no {name!r}, it has {', '.join(stand_in.__all__)}. "
                "Fix: install horovod, or leave the name out."
            )
        return getattr(stand_in, name)

    return found


def _stand_in(module: str) -> str:
    is_on_stages = _STAGES in sys.modules and module == "horovod.tensorflow"
    return f"{_STAGES}.horovod" if is_on_stages else _STAND_INS[module]
