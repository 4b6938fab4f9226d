"""Run in a container: what wheels have of globs on site-packages, what of it is left, and who misses what is not."""

from __future__ import annotations

import ast
import fnmatch
import importlib.metadata
import json
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

SITE = Path(sysconfig.get_path("platlib"))
IMPORTS = re.compile(r"^[ \t]*(?:from|import)\b(?:[^\n(]*\([^)]*\)|[^\n]*)", re.MULTILINE)


def main(globs: list[str]) -> None:
    recorded = {str(path) for found in importlib.metadata.distributions() for path in found.files or ()}
    wheels = {path for path in recorded if not path.startswith(("..", "pip/"))}
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


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
