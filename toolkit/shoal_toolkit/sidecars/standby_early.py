"""Imports for a host that waits for its job: a part of sidecars/standby.py.

Such a host has the source of the last run. So the directories of the source are not on sys.path during the imports.
"""

from __future__ import annotations

import contextlib
import os
import site
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.machinery import all_suffixes

from shoal_toolkit.files import list_names

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class EarlyImports:
    """The imports before a job. Modules of the source are none of them."""

    def __init__(self) -> None:
        self._own = _list_directories(sys.path[0], os.getcwd(), os.environ)
        self._absent: set[str] = set()

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Notes that no installed module has this name. Python asks the last finder if no other has found it."""
        if path is None:
            self._absent.add(name)

    @contextlib.contextmanager
    def leave_out_source(self) -> Iterator[None]:
        """Takes the directories of the source off sys.path."""
        kept = list(sys.path)
        sys.path[:] = [each for each in kept if not _is_inside(each, self._own)]
        sys.meta_path.append(self)
        try:
            yield
        finally:
            sys.meta_path.remove(self)
            sys.path[:] = kept

    def find_foreign(self) -> str:
        """Returns a module that is not installed, and so may be another one when the job starts; empty if none is."""
        installed = {sys.prefix, sys.base_prefix, *site.getsitepackages(), site.getusersitepackages(), _PACKAGE}
        installed |= {os.path.realpath(each) for each in installed}
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__dict__", {}).get("__file__")
            # torch has modules with the name of a file that does not exist.
            if not isinstance(file, str) or not os.path.isabs(file):
                continue
            if _is_inside(file, self._own) or not _is_inside(file, installed):
                return name
        return ""

    def misses(self, arguments: Sequence[str], cwd: str, environ: Mapping[str, str]) -> bool:
        """Returns whether the source of `python ARGUMENT ...` has a module that frameworks did not find."""
        words = arguments[2:] if arguments[:2] == ["-m", "mpi4py"] else arguments
        first = cwd if words[0] == "-m" else os.path.dirname(os.path.realpath(os.path.join(cwd, words[0])))
        own = _list_directories(first, cwd, environ)
        return any(not self._absent.isdisjoint(list_modules(directory)) for directory in own)


def list_modules(directory: str) -> set[str]:
    """Returns the names of the modules and packages in a directory."""
    suffixes = tuple(all_suffixes())
    names = (name for name in list_names(directory) if name.isidentifier() or name.endswith(suffixes))
    return {base for base in (name.partition(".")[0] for name in names) if base.isidentifier()}


def _list_directories(first: str, cwd: str, environ: Mapping[str, str]) -> set[str]:
    """Returns the directories with modules of a script's own, also without links in their paths."""
    found = {first, cwd, *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))}
    return found | {os.path.realpath(each) for each in found}


def _is_inside(path: str, directories: Iterable[str]) -> bool:
    return any(path == each or path.startswith(f"{each.rstrip('/')}/") for each in directories)
