"""Finds the imports of a script in its source and in its own modules, without running it."""

from __future__ import annotations

import ast
import importlib.util
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_MOST_FILES = 1000
_MOST_BYTES = 1 << 20  # of a source file


class Imported(NamedTuple):
    """An import of a script."""

    module: str
    name: str  # of `from module import name`; empty otherwise
    at_import: bool  # whether it is executed when its file is imported, and not only in a function


def find_imports(arguments: Sequence[str], path: Sequence[str]) -> list[Imported]:
    """Returns the imports of modules that are not the script's own, in the order in which they are found.

    Files that are missing or no Python are left out: the script gets the error itself.

    Args:
        arguments: The arguments of Python: a file, or `-m` and a module.
        path: Directories with modules of the script's own; the first is the one that Python puts first on its path.
    """
    waiting, package = _find_start(arguments, path)
    seen, found = set(waiting), dict[Imported, None]()
    while waiting and len(seen) <= _MOST_FILES:
        file = waiting.pop(0)
        for each in _read_imports(file):
            own = _find_files(each, file, path, package)
            waiting += [other for other in own if other not in seen]
            seen.update(own)
            if not own and not each.module.startswith("."):
                found[each] = None
    return list(found)


def _find_start(arguments: Sequence[str], path: Sequence[str]) -> tuple[list[str], str]:
    """Returns the files of the script, and the directory of an installed package that it is a part of."""
    if arguments[0] != "-m":
        return [arguments[0]], ""
    top = arguments[1].partition(".")[0]
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    package = os.path.dirname(spec.origin) if spec and spec.submodule_search_locations and spec.origin else ""
    roots = [*path, os.path.dirname(package)] if package else path
    return [file for name in (arguments[1], f"{arguments[1]}.__main__") for file in _find_module(name, roots)], package


def _read_imports(file: str) -> Iterator[Imported]:
    try:
        with open(file, "rb") as source:
            tree = ast.parse(source.read(_MOST_BYTES))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    outside = {id(each) for node in ast.walk(tree) if isinstance(node, _LATER) for each in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Imported(alias.name, "", id(node) not in outside)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield Imported("." * node.level + (node.module or ""), alias.name, id(node) not in outside)


_LATER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.If)  # an `if` may be TYPE_CHECKING, or of an option


def _find_files(each: Imported, file: str, path: Sequence[str], package: str) -> list[str]:
    """Returns the files of the script's own that an import executes."""
    module = each.module.lstrip(".")
    level = len(each.module) - len(module)
    roots = list(path)
    if level:
        roots = [os.path.normpath(os.path.join(os.path.dirname(file), *[os.pardir] * (level - 1)))]
    elif package and module.partition(".")[0] == os.path.basename(package):
        roots.append(os.path.dirname(package))
    names = [".".join(filter(None, (module, each.name))), module] if each.name else [module]
    return [found for name in names if name for found in _find_module(name, roots)]


def _find_module(name: str, roots: Sequence[str]) -> list[str]:
    """Returns the files of a module and of the packages that contain it, of the first directory that has it."""
    parts = name.split(".")
    for root in roots:
        packages = [os.path.join(root, *parts[:count], "__init__.py") for count in range(1, len(parts) + 1)]
        found = [file for file in (*packages, os.path.join(root, *parts) + ".py") if os.path.isfile(file)]
        if found:
            return found
    return []
