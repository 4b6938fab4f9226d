"""Measures the tests: changes modules drawn by seed in one place at a time, and counts changes that no test finds.

    scripts/mutants.py --seed 1 --modules 12 --each 10       half an hour or more
    scripts/mutants.py --seed 1 --module library/….py        one module; --only 3: one of its mutants

It tests HEAD, in two clones in the cache with a .venv of their own. Each mutant gets the quick tests of at most four
files that need no Docker, so another test may find a survivor. If the tests do not end, that counts as killed.
You judge whether a survivor matters: some are equivalent to the code, such as another size of a buffer.

mutmut 3 changes functions only, and finds tests by the calls in its own process. In cosmic-ray 8, calls keep their
keywords, and no tests are selected. Our tests start most code in other processes, so neither is used.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import contextlib
import functools
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import affected
import tomllib

ROOT = affected.ROOT
sys.path.append(str(ROOT / "benchmarks"))
from report import Figure, finish  # noqa: E402

PRODUCT = (
    "images/shoal",
    "toolkit/shoal_toolkit",
    "checkpoint/shoal_checkpoint",
    "library/smdistributed",
    "rehearsal/shoal_rehearsal",
)
WITHOUT_DOCKER = re.compile("tests/(images|toolkit|library)/")
GUARDS = ("TYPE_CHECKING", "__name__ == '__main__'")
FILES, WORKERS, ENDLESS = 4, 2, -9
OPPOSITES: dict[type, str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
    ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in", ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*",
}  # fmt: skip


class Mutant(NamedTuple):
    """A node of a module, and the text that replaces it."""

    node: ast.expr | ast.stmt
    text: str

    def __str__(self) -> str:
        before = " ".join(ast.unparse(self.node).split())
        return f"{self.node.lineno}: {before[:70]}  →  {self.text[:70]}"

    def apply(self, source: str) -> str:
        """Return the source of the module with the change."""
        lines = source.encode().splitlines(keepends=True)
        first, last = self.node.lineno - 1, (self.node.end_lineno or 0) - 1
        head, tail = lines[first][: self.node.col_offset], lines[last][self.node.end_col_offset :]
        return b"".join([*lines[:first], head, self.text.encode(), tail, *lines[last + 1 :]]).decode()


def mutants(node: ast.AST) -> Iterator[Mutant]:
    """Yield the mutants of a node and those below it. Annotations, decorators, docstrings and texts of errors stay."""
    if isinstance(node, (ast.expr, ast.stmt)):
        yield from (Mutant(node, text) for text in _replacements(node))
    if isinstance(node, (ast.If, ast.IfExp)):
        yield Mutant(node.test, f"(not ({ast.unparse(node.test)}))")
    if isinstance(node, (ast.Raise, ast.JoinedStr, ast.Assert)):
        return
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            is_docstring = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            is_guard = isinstance(child, ast.If) and ast.unparse(child.test) in GUARDS
            is_kept = name in ("annotation", "returns", "decorator_list") or is_docstring or is_guard
            if isinstance(child, ast.AST) and not is_kept:
                yield from mutants(child)


def _replacements(node: ast.expr | ast.stmt) -> Iterator[str]:
    say = ast.unparse
    if isinstance(node, (ast.Compare, ast.BinOp)):
        yield from _other_operator(node)
    elif isinstance(node, ast.BoolOp):
        word = " or " if isinstance(node.op, ast.And) else " and "
        yield f"({word.join(f'({say(value)})' for value in node.values)})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield f"bool({say(node.operand)})"
    elif isinstance(node, ast.Constant):
        yield from _other_constants(node.value)
    elif isinstance(node, ast.Call):
        words, name = [say(word) for word in [*node.args, *node.keywords]], say(node.func)
        first = len(node.args) - (len(node.args) > 1 and name not in dir(builtins))  # isinstance(x) fails in any test
        yield from (f"{name}({', '.join(words[:left] + words[left + 1 :])})" for left in range(first, len(words)))
    elif isinstance(node, ast.stmt):
        yield from _other_statement(node)


def _other_operator(node: ast.Compare | ast.BinOp) -> list[str]:
    operators: list[ast.AST] = [node.op] if isinstance(node, ast.BinOp) else [*node.ops]
    right = node.right if isinstance(node, ast.BinOp) else node.comparators[0]
    other = OPPOSITES.get(type(operators[0])) if len(operators) == 1 else None
    return [f"(({ast.unparse(node.left)}) {other} ({ast.unparse(right)}))"] if other else []


def _other_constants(value: object) -> list[str]:
    if isinstance(value, bool):
        return [str(not value)]
    if isinstance(value, (int, float)):
        return [f"({value + 1})", f"({value - 1})"]
    is_text = isinstance(value, str) and value and " " not in value  # a text with spaces is for people
    return [repr(f"{value}x")] if is_text else []


def _other_statement(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Return):
        return ["return None"] if node.value and ast.unparse(node.value) != "None" else []
    stores = isinstance(node, ast.Assign) and isinstance(node.targets[0], (ast.Attribute, ast.Subscript))
    calls = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    return ["pass"] if stores or calls or isinstance(node, (ast.AugAssign, ast.Delete, ast.Raise)) else []


@functools.cache
def read_words(test: str) -> frozenset[str]:
    """Return the words of a test file, of its helpers, and of the scripts of ranks that it starts."""
    files = [path for path in (ROOT / test, *affected.imported(ROOT / test)) if ROOT / "tests" in path.parents]
    texts = [path.read_text() for path in files]
    scripts = {ROOT / "tests/library/ranks" / name for name in re.findall(r"\w+\.py\b", " ".join(texts))}
    texts += [path.read_text() for path in scripts if path.is_file()]
    return frozenset(re.findall(r"\w+", " ".join(texts)))


def rank_tests(module: Path, tests: list[str]) -> list[str]:
    """Return test files, first those that import the module or name what is named in few other files."""
    defined = (ast.FunctionDef, ast.ClassDef)
    names = {node.name for node in ast.walk(ast.parse(module.read_text())) if isinstance(node, defined)} | {module.stem}
    weights = {name: 1 / (1 + sum(name in read_words(test) for test in tests)) for name in names}

    folder = {"images": "tests/images/", "toolkit": "tests/toolkit/"}.get(
        module.relative_to(ROOT).parts[0], "tests/library/"
    )

    def score(test: str) -> float:
        named = sum(weights[name] for name in names & read_words(test))
        return (module in affected.imported(ROOT / test)) + named * (1.0 if test.startswith(folder) else 0.1)

    return sorted((test for test in tests if score(test)), key=score, reverse=True)


def run_tests(root: Path, files: list[str], limit: float) -> tuple[int, float]:
    """Run the quick tests of files; return pytest's exit code, or `ENDLESS` if the limit ended it, and the seconds."""
    began = time.monotonic()
    command = [".venv/bin/pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not long", *files]
    with tempfile.TemporaryFile() as log:  # a pipe would wait for processes that outlive pytest
        process = subprocess.Popen(command, cwd=root, stdout=log, stderr=log, start_new_session=True)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = ENDLESS
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return code, time.monotonic() - began


def measure(root: Path, name: str, given: argparse.Namespace) -> list[str]:
    """Return what happened to each mutant of a module, and print it."""
    rows = tomllib.loads((root / "tests/affected.toml").read_text())
    tests = [
        test for test in affected.test_files() if WITHOUT_DOCKER.match(test) and affected.depends(test, name, rows)
    ]
    files: list[str] = []
    slow: list[str] = []
    left = given.limit
    for test in rank_tests(ROOT / name, tests)[:FILES]:
        code, took = run_tests(root, [test], left)
        files, left = ([*files, test], left - took) if code == 0 else (files, left)
        slow += [test] if code == ENDLESS else []
        print(f"# {name}: {test} ({took:.0f} s, exit code {code})", flush=True)
    path, results = root / name, []
    source = path.read_text()
    found = list(mutants(ast.parse(source)))
    chosen = random.Random(f"{given.seed} {name}").sample(found, min(given.each, len(found)))
    for number, mutant in enumerate(chosen):
        if given.only in (None, number):
            path.write_text(mutant.apply(source))
            os.utime(path, (1e9 + number, 1e9 + number))  # Python compiles it again, also within a second
            code = run_tests(root, files, 2 * (given.limit - left) + 10)[0] if files else 0
            if code == 0 and any(run_tests(root, [test], given.limit)[0] == 1 for test in slow):
                code = 1
            word = {0: "survived", ENDLESS: "killed by time"}.get(code, "killed")
            results.append(word)
            print(f"{word:14} {number} {name}:{mutant}", flush=True)
    path.write_text(source)
    return results


def make_clone(number: int) -> Path:
    """Return a clone with HEAD. It stays in the cache, so that the next run does not make its .venv again."""
    clone = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / f"shoal-tests/mutants-{number}"
    subprocess.run(["git", "init", "-q", clone], check=True)
    for words in (["fetch", "-q", str(ROOT), "HEAD"], ["checkout", "-qf", "FETCH_HEAD"]):
        subprocess.run(["git", *words], cwd=clone, check=True)
    subprocess.run(["make", "setup-all"], cwd=clone, check=True, stdout=subprocess.DEVNULL)
    return clone


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--modules", type=int, default=12, help="modules to draw (%(default)s)")
    parser.add_argument("--each", type=int, default=10, help="mutants of each module (%(default)s)")
    parser.add_argument("--module", action="append", default=[], help="this module, instead of drawn ones")
    parser.add_argument(
        "--limit",
        type=float,
        default=40,
        help="seconds for the tests of a module (%(default)s); more beside other load",
    )
    parser.add_argument("--only", type=int, help="one mutant, by its number")
    given = parser.parse_args()
    files = [name for name in affected.git("ls-files", *PRODUCT) if name.endswith(".py") and "/tensorflow/" not in name]
    large = [name for name in files if sum(1 for _ in mutants(ast.parse((ROOT / name).read_text()))) >= given.each]
    names = given.module or random.Random(given.seed).sample(sorted(large), given.modules)
    free: SimpleQueue[Path] = SimpleQueue()

    def work(name: str) -> list[str]:
        clone = free.get()
        try:
            return measure(clone, name, given)
        finally:
            free.put(clone)

    for number in range(WORKERS):
        free.put(make_clone(number))
    with ThreadPoolExecutor(WORKERS) as pool:
        results = [result for found in pool.map(work, names) for result in found]
    survived = results.count("survived")
    print(f"{len(results) - survived} of {len(results)} mutants killed, seed {given.seed}")
    return finish([Figure("mutants-survived", 100 * survived / len(results), "%", goal=15)])


if __name__ == "__main__":
    sys.exit(main())
