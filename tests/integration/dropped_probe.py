"""Run in a container: what wheels have of globs on site-packages, what of it is left, and who misses what is not.

The test calls `print_listed` or `print_missed` after it.
"""

from __future__ import annotations

import ast
import csv
import fnmatch
import importlib.metadata
import json
import re
import sysconfig
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

SITE = Path(sysconfig.get_path("platlib"))
IMPORTS = re.compile(r"^[ \t]*(?:from|import)\b(?:[^\n(]*\([^)]*\)|[^\n]*)", re.MULTILINE)


def print_listed(globs: list[str]) -> None:
    """Print how many files of wheels each glob takes. Reads pip's records only."""
    wheels = recorded()
    print(json.dumps({glob: sum(matches(path, glob) for path in wheels) for glob in globs}))


def print_missed(globs: list[str]) -> None:
    """Print the same, what of it is left, and who imports or names what is gone."""
    wheels = recorded()
    dropped = {glob: [path for path in wheels if matches(path, glob)] for glob in globs}
    kept = [path for path in sorted(wheels.difference(*dropped.values())) if path.endswith(".py")]
    there = [path for path in kept if (SITE / path).is_file()]
    document = {
        "listed": {glob: len(paths) for glob, paths in dropped.items()},
        "left": [path for paths in dropped.values() for path in paths if (SITE / path).exists()],
        "top": sorted(top(wheels, globs).difference(*dropped.values())),
        "importers": importers(dropped, there),
        "namers": namers(dropped, there),
    }
    print(json.dumps(document))


def recorded() -> set[str]:
    """Return the paths of all files that wheels brought, less pip's own.

    As pip wrote them down: from Python 3.12 on, `Distribution.files` leaves out what is not there any more.
    """
    records = (found.read_text("RECORD") or "" for found in importlib.metadata.distributions())
    paths = {row[0] for record in records for row in csv.reader(record.splitlines())}
    return {path for path in paths if not path.startswith(("..", "pip/"))}


def top(wheels: set[str], globs: list[str]) -> set[str]:
    """What of the same name lies at the top of site-packages, where a glob that begins with `*/` does not reach."""
    names = [glob[2:] for glob in globs if glob.startswith("*/")]
    return {path for path in wheels if any(matches(path, name) for name in names)}


def importers(dropped: Mapping[str, list[str]], kept: list[str]) -> dict[str, list[str]]:
    """Which modules that are gone each file may import."""
    modules = {".".join(parts(path)) for paths in dropped.values() for path in paths if path.endswith(".py")}
    words = {word(glob) for glob, paths in dropped.items() if any(path.endswith(".py") for path in paths)}
    found = {path: sorted(modules.intersection(imported(path, words))) for path in kept}
    return {path: names for path, names in found.items() if names}


def namers(dropped: Mapping[str, list[str]], kept: list[str]) -> dict[str, list[str]]:
    """Which files that are gone each file names, of entries for a kind of file (`*.a`): who loads one has its name."""
    bare = [paths for glob, paths in dropped.items() if Path(glob).suffix not in ("", ".py")]
    names = {Path(path).name for paths in bare for path in paths}
    texts = ((path, (SITE / path).read_text(errors="replace")) for path in kept)
    found = {path: sorted(name for name in names if name in text) for path, text in texts}
    return {path: names for path, names in found.items() if names}


def word(glob: str) -> str:
    """What stands in each statement that imports what a glob takes: the longest part of its last name that is no sign.

    Reading statements costs far less than parsing them. A glob of signs alone has the empty word, which is in all.
    """
    return max(re.findall(r"\w+", glob.rpartition("/")[2].removesuffix(".py")), key=len, default="")


def matches(path: str, glob: str) -> bool:
    """As `find -path` does, and below a directory."""
    return fnmatch.fnmatchcase(path, glob) or fnmatch.fnmatchcase(path, f"{glob}/*")


def parts(path: str) -> list[str]:
    return path.removesuffix(".py").removesuffix("/__init__").split("/")


def imported(path: str, words: set[str]) -> Iterator[str]:
    """Yield the names of the modules that a file may import, where one of the words is in such a statement."""
    text = (SITE / path).read_text(errors="replace")
    if not any(word in text for word in words):  # much cheaper than the search below
        return
    if not any(word in statement for statement in IMPORTS.findall(text) for word in words):
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
