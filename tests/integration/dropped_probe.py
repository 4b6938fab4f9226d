"""Run in a container: what wheels have of globs on site-packages, what of it is left, and who imports what is not."""

from __future__ import annotations

import ast
import fnmatch
import importlib.metadata
import json
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

SITE = Path(sysconfig.get_path("platlib"))
IMPORTS = re.compile(r"^[ \t]*(?:from|import)\b(?:[^\n(]*\([^)]*\)|[^\n]*)", re.MULTILINE)


def main(globs: list[str]) -> None:
    recorded = {str(path) for found in importlib.metadata.distributions() for path in found.files or ()}
    wheels = {path for path in recorded if not path.startswith(("..", "pip/"))}
    dropped = {glob: [path for path in wheels if matches(path, glob)] for glob in globs}
    gone = {path for paths in dropped.values() for path in paths}
    modules = {".".join(parts(path)) for path in gone if path.endswith(".py")}
    kept = [path for path in sorted(wheels - gone) if path.endswith(".py") and (SITE / path).is_file()]
    importers = {path: sorted(modules.intersection(imported(path))) for path in kept}
    document = {
        "listed": {glob: len(paths) for glob, paths in dropped.items()},
        "left": [path for path in gone if (SITE / path).exists()],
        "importers": {path: found for path, found in importers.items() if found},
    }
    print(json.dumps(document))


def matches(path: str, glob: str) -> bool:
    """As `find -path` does, and below a directory."""
    return fnmatch.fnmatchcase(path, glob) or fnmatch.fnmatchcase(path, f"{glob}/*")


def parts(path: str) -> list[str]:
    return path.removesuffix(".py").removesuffix("/__init__").split("/")


def imported(path: str) -> Iterator[str]:
    """Yield the names of the modules that a file may import."""
    text = (SITE / path).read_text(errors="replace")
    if not any("test" in statement for statement in IMPORTS.findall(text)):
        return
    with warnings.catch_warnings(action="ignore"):
        try:
            tree = ast.parse(text)
        except SyntaxError:  # a template, or of another Python: nobody imports it either
            return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = ".".join([*package(path, node.level), *filter(None, [node.module])])
            yield origin
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def package(path: str, level: int) -> list[str]:
    """The package that so many dots mean in a file."""
    if not level:
        return []
    own = path.split("/")[:-1]
    return own[: len(own) - level + 1]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
