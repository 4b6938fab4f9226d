"""Checks that documented public functions describe their arguments, results and errors, and counts other functions.

docs/api/dataparallel.md has the documented functions. Each needs `Args` with every parameter, `Returns` if it returns
something, and `Raises` if its body raises something. A first line that begins with "Returns" is enough for the result.
In the other modules, the functions that another module imports are counted.
"""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from reference_pages import dataparallel

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("images", "toolkit", "checkpoint", "library", "rehearsal")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def documented() -> Iterator[tuple[str, Function, str]]:
    """Yields the name, definition and docstring of each documented function. A class counts by its constructor."""
    for module in map(import_module, dataparallel.MODULES):
        for name in dataparallel.NAMES.get(module.__name__) or dataparallel.list_public(module):
            value = getattr(module, name)
            if getattr(value, "__module__", None) != module.__name__ or not callable(value):
                continue
            node = ast.parse(textwrap.dedent(inspect.getsource(value))).body[0]
            if isinstance(node, ast.ClassDef):
                constructors = [each for each in node.body if getattr(each, "name", "") == "__init__"]
                docstring = ast.get_docstring(node)
                node = constructors[0] if constructors else node
            if isinstance(node, Function):
                docstring = ast.get_docstring(node) if node.name != "__init__" else docstring
                yield f"{module.__name__}.{name}", node, docstring or ""


def missing(function: Function, docstring: str) -> list[str]:
    """Returns the names of the sections and parameters that a docstring lacks.

    Args:
        function: The definition, as parsed.
        docstring: Its docstring, or the docstring of its class.

    Returns:
        `Args`, `Returns` or `Raises` for a section, and `Args: name` for a parameter.
    """
    given = function.args
    names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    names += [each.arg for each in (given.vararg, given.kwarg) if each]
    listed = docstring.partition("Args:\n")[2]
    found = [
        f"Args: {name}"
        for name in names
        if name not in ("self", "cls")
        and not re.search(rf"^\s+[\w, *]*\b{name}\b[\w, *]*(?:\([^)]*\))?: ", listed, re.M)
    ]
    returns = function.returns
    described = docstring.startswith(("Returns ", "Yields ")) or _has(docstring, "Returns|Yields")
    if returns is not None and ast.unparse(returns) not in ("None", "NoReturn") and not described:
        found.append("Returns")
    if any(isinstance(node, ast.Raise) and node.exc for node in ast.walk(function)) and not _has(docstring, "Raises"):
        found.append("Raises")
    return found


def _has(docstring: str, section: str) -> bool:
    return re.search(rf"^(?:{section}):$", docstring, re.MULTILINE) is not None


def imported() -> Iterator[tuple[str, Function]]:
    """Yields the package and definition of each public function that another module imports by name."""
    listed = subprocess.run(["git", "ls-files", *PACKAGES], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    trees = {name: ast.parse((ROOT / name).read_text()) for name in listed.splitlines() if name.endswith(".py")}
    used = {
        alias.name
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for name, tree in trees.items():
        for node in tree.body:
            if isinstance(node, Function) and node.name in used and not node.name.startswith("_"):
                yield name.partition("/")[0], node


def main() -> None:
    lacking = {name: found for name, node, text in documented() if (found := missing(node, text))}
    for name, found in lacking.items():
        print(f"{name}: the docstring has no {', '.join(found)}")
    total, complete = Counter[str](), Counter[str]()
    for package, node in imported():
        total[package] += 1
        complete[package] += not missing(node, ast.get_docstring(node) or "")
    counts = ", ".join(f"{package} {complete[package]} of {total[package]}" for package in total)
    print(
        f"docstrings: {len(lacking)} documented functions lack a section; complete elsewhere: {counts}", file=sys.stderr
    )
    sys.exit(bool(lacking))


if __name__ == "__main__":
    main()
