"""Prints the test files that a change can affect, one per line, and the skipped ones with reasons on stderr.

    scripts/affected.py 1      since the branch left the main branch of origin; without an origin, uncommitted
    scripts/affected.py REV    since that revision

A test file depends on itself, on the conftests above it, and on the modules of this repository that these import,
directly or indirectly. It also depends on files that tests/affected.toml lists for it. Plugins such as pytest-testmon
follow imports only. They miss code that runs in other processes, as most of our code does.

In images/, most modules import most others in some way, so the limit is two imports. A test also imports what programs
in its strings import, and the commands of `shoal` that it names. Tests with containers need minutes. They depend on
those modules in images/ that tests/affected.toml lists for them. `make test` runs all.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parents[1]
WITH_CONTAINERS = ("tests/integration/", "tests/faults/", "tests/conformance/")
NEAR = 2
COMMANDS = ROOT / "images" / "shoal" / "commands"
PACKAGES = ("", "images", "toolkit", "checkpoint", "library", "rehearsal", "benchmarks")
"""The directories from which modules are imported."""


def git(*words: str) -> list[str]:
    ended = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"affected: git {' '.join(words)}: {ended.stderr.strip()}")
    return ended.stdout.splitlines()


def changed_since(revision: str) -> tuple[str, list[str]]:
    """Returns the base of the comparison, and the files that differ from it: committed, uncommitted and new."""
    if revision == "1":
        has_origin = "origin/HEAD" in git("for-each-ref", "--format=%(refname:short)", "refs/remotes/origin/HEAD")
        revision = git("merge-base", "HEAD", "origin/HEAD")[0] if has_origin else "HEAD"
    new = git("ls-files", "--others", "--exclude-standard")
    return revision, sorted({*git("diff", "--name-only", revision), *new})


@functools.cache
def glob(pattern: str) -> re.Pattern[str]:
    """Returns an expression for a glob: `**` matches anything, `*` anything without a slash."""
    parts = re.split(r"(\*\*/?|\*|\[[^\]]*\])", pattern)
    words = {"**": ".*", "**/": "(?:.*/)?", "*": "[^/]*"}
    return re.compile("".join(words.get(part) or (part if part[:1] == "[" else re.escape(part)) for part in parts))


@functools.cache
def imported(path: Path) -> frozenset[Path]:
    """Returns the files of this repository that a module imports directly."""
    if path.suffix != ".py" or not path.exists():
        return frozenset()
    return frozenset(file for name in _names(path) for file in _files(name))


def _names(path: Path) -> Iterator[str]:
    package = path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            stem = ".".join(part for part in (above, node.module) if part)
            yield from (f"{stem}.{alias.name}" for alias in node.names)
        elif package[0] == "tests" and isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"\bshoal(?:\.\w+)+", node.value)


def _commands_of(path: Path) -> Iterator[Path]:
    """Yields the modules of the commands of `shoal` that a test file starts."""
    tree = ast.parse(path.read_text())
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    if "shoal_command" in names or 'with_name("shoal")' in path.read_text():
        yield COMMANDS.parent / "cli.py"
        words = {text.split(maxsplit=1)[0] for text in texts if text.strip()}
        yield from (module for command, module in _commands().items() if command in words)


@functools.cache
def _commands() -> dict[str, Path]:
    """Returns the module of each command of `shoal`."""
    return {
        command: path
        for path in COMMANDS.glob("*.py")
        for command in re.findall(r'^@app\.command\("([a-z]+)"', path.read_text(), re.MULTILINE)
    }


def _files(name: str) -> Iterator[Path]:
    """Yield the files of a module and of the packages that it is in; the last word may be a name inside a module."""
    words = name.split(".")
    for package in PACKAGES:
        for count in range(1, len(words) + 1):
            place = ROOT.joinpath(package, *words[:count])
            yield from (file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file())


def closure(files: Sequence[Path]) -> set[Path]:
    """Return these files and all that they import."""
    found: set[Path] = set()
    waiting = list(files)
    while waiting:
        if (file := waiting.pop()) not in found:
            found.add(file)
            waiting += imported(file)
    return found


def affected(changed: Sequence[str], tests: Sequence[str], rows: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return the changed files that each test file depends on."""
    return {test: [name for name in changed if depends(test, name, rows)] for test in tests}


def depends(test: str, name: str, rows: Mapping[str, Sequence[str]]) -> bool:
    """Return whether a test file depends on a file, both by their path from the root."""
    if any(glob(pattern).fullmatch(name) for pattern in _patterns(test, rows)):
        return True
    if test.startswith(WITH_CONTAINERS) and name.startswith("images/"):
        return False
    path = ROOT / name
    if name.startswith("images/"):
        return (path if path.suffix == ".py" else path.parent / "__init__.py") in _near(test)
    return path in _imports(test)


def _patterns(test: str, rows: Mapping[str, Sequence[str]]) -> list[str]:
    return [pattern for tests, needs in rows.items() if glob(tests).fullmatch(test) for pattern in needs]


@functools.cache
def _imports(test: str) -> frozenset[Path]:
    path = ROOT / test
    conftests = [folder / "conftest.py" for folder in path.parents if (folder / "conftest.py").exists()]
    return frozenset(closure([path, *conftests]))


@functools.cache
def _near(test: str) -> frozenset[Path]:
    """Returns the files up to `NEAR` imports away from a test, its helpers and the commands that they start."""
    # Not the conftests: a test that uses what a fixture makes names its type.
    own = {file for file in closure([ROOT / test]) if ROOT / "tests" in file.parents}
    found = own | {file for path in own for file in _commands_of(path)}
    for _ in range(NEAR):
        found |= {file for path in found for file in imported(path)}
    return frozenset(found)


def test_files() -> list[str]:
    """Return all test files but those that run in an image alone."""
    found = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))
    return [name for name in found if not name.startswith("tests/library_tensorflow/")]


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    revision, changed = changed_since(arguments[0])
    chosen = affected(changed, test_files(), tomllib.loads((ROOT / "tests/affected.toml").read_text()))
    for test in (test for test, names in chosen.items() if names):
        print(test)
    for line in summary(revision, changed, chosen):
        print(f"affected: {line}", file=sys.stderr)
    return 0


def summary(revision: str, changed: Sequence[str], chosen: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield what was chosen and left out, in words."""
    yield f"{len(changed)} files differ from {revision}"
    needed = {name for names in chosen.values() for name in names}
    if free := [name for name in changed if name not in needed]:
        yield f"no test depends on: {', '.join(free)}"
    left = Counter(str(Path(test).parent) for test, names in chosen.items() if not names)
    run = sum(1 for names in chosen.values() if names)
    words = ", ".join(f"{folder} ({count})" for folder, count in left.items()) or "nothing"
    yield f"{run} of {len(chosen)} test files are run; left out: {words}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
