"""How large the code is: `make bench NAME=house` counts what a newcomer has to read.

`--since COMMIT` counts that commit too, as the rival. Blank lines and comments are lines. The goals are the project's.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from report import Figure, finish, make_parser, print_machine

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("images", "toolkit", "library", "checkpoint", "rehearsal", "dockerfiles")
PACKAGES = ("shoal", "shoal_toolkit", "shoal_checkpoint", "shoal_rehearsal", "smdistributed")
LANGUAGES = (".py", ".c", ".h", ".sh", ".j2", ".css", ".js")
SHORT = 40
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
GOALS = {
    "product-lines": 52_000,
    "modules": 340,
    "short-modules": 25,
    "internal-imports": 2.6,
    "docstring-lines": 8_500,
    "repeated-classes": 0,
    "test-lines": 40_000,
    "noop-modules": 30,
    "noop-lines": 4_000,
}
NOOP = """
import sys
from shoal_toolkit import cli
code = cli.main([])
files = [module.__file__ for name, module in sys.modules.items() if name.startswith("shoal_toolkit")]
print(code, *filter(None, files), sep="\\n", file=sys.stderr)
"""
"""Runs `train` in this interpreter, then names the modules of the toolkit that it imported."""


def main(arguments: Sequence[str]) -> int:
    """Count the checkout, and a commit if one is named."""
    options = make_parser(__doc__)
    options.add_argument("--since", metavar="COMMIT", help="count this commit as the rival")
    commit = options.parse_args(arguments).since
    print_machine()
    ours = count(ROOT)
    rival: dict[str, float] = {}
    if commit:
        with tempfile.TemporaryDirectory() as directory:
            packed = subprocess.run(("git", "archive", commit), cwd=ROOT, check=True, capture_output=True).stdout
            with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
                archive.extractall(directory, filter="data")
            rival = count(Path(directory))
    return finish(
        Figure(name, value, name.rpartition("-")[2], GOALS[name], rival.get(name), commit or "")
        for name, value in ours.items()
    )


def count(root: Path) -> dict[str, float]:
    """Returns the figures of a checkout by name."""
    files = [path for name in PRODUCT for path in list_files(root / name) if is_written(path)]
    modules = [path for path in files if path.suffix == ".py"]
    lines = {path: count_lines(path) for path in files}
    trees = {path: ast.parse(path.read_text()) for path in modules}
    classes = Counter(node.name for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    noop = list_noop_modules(root)
    tests = [path for path in list_files(root / "tests") if path.suffix == ".py"]
    return {
        "product-lines": sum(lines.values()),
        "modules": len(modules),
        "short-modules": sum(lines[path] < SHORT for path in modules),
        "internal-imports": sum(map(count_internal_imports, trees.values())) / len(modules),
        "docstring-lines": sum(map(count_docstring_lines, trees.values())),
        "repeated-classes": sum(number > 1 for number in classes.values()),
        "test-lines": sum(map(count_lines, tests)),
        "noop-modules": len(noop),
        "noop-lines": sum(map(count_lines, noop)),
    }


def list_files(directory: Path) -> Iterator[Path]:
    """Yields the files under a directory that git would keep, as far as names tell."""
    for path in sorted(directory.rglob("*")):
        if path.is_file() and not {"__pycache__", "build", "rendered"} & set(path.parts):
            yield path


def count_lines(path: Path) -> int:
    """Returns the lines of a text file."""
    return len(path.read_text().splitlines())


def is_written(path: Path) -> bool:
    """Says whether somebody wrote this file by hand, in one of the counted languages."""
    return path.suffix in LANGUAGES


def count_internal_imports(tree: ast.Module) -> int:
    """Returns how many modules of Shoal this one imports, wherever the statement stands."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" if node.module in PACKAGES else node.module for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return sum(name.partition(".")[0] in PACKAGES for name in found)


def count_docstring_lines(tree: ast.Module) -> int:
    """Returns the lines of the docstrings of a module, its classes and its functions."""
    total = 0
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node):
            first = node.body[0]
            total += (first.end_lineno or first.lineno) - first.lineno + 1
    return total


def list_noop_modules(root: Path) -> list[Path]:
    """Runs a script that does nothing with a checkout's `train`. Returns the toolkit's modules that were imported."""
    with tempfile.TemporaryDirectory() as base:
        code = Path(base, "code")
        code.mkdir()
        (code / "train.py").touch()
        environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(root / "toolkit"), "SAGEMAKER_BASE_DIR": base}
        environment |= {"SAGEMAKER_PROGRAM": "train.py", "HOME": base}
        command = (sys.executable, "-c", NOOP)
        ended = subprocess.run(command, env=environment, cwd=base, check=True, capture_output=True, text=True)
    shown = ended.stderr.splitlines()
    found = [Path(line) for line in shown if line.startswith(str(root)) and line.endswith(".py")]
    assert found, f"train ended without its modules: {shown}"
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
