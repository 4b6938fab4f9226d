"""docs/exit-codes.md: the exit codes of `shoal` and `train`, from the classes and constants that have them."""

from __future__ import annotations

import ast
import inspect
import re
import signal
from collections.abc import Iterable, Iterator

from reference_pages.commands import list_commands
from reference_pages.markdown import code, page, table
from shoal.cli import EXIT_SIGNALS
from shoal.errors import ShoalError
from shoal_toolkit import errors
from shoal_toolkit.system.loop import STOP_SIGNALS

_COLUMNS = ("code", "kind", "meaning", "fix")
_HEAD = """# Exit codes

`make reference` writes this page from the code. 0 means success. With `--json`, codes stay the same:
[documents of `--json`](reference/json.md).

## shoal

Each kind of failure has its own code. The message on standard error begins with `shoal:` and has the problem, its place
and a fix. An unknown option or argument has a message of its own form, and code 2."""
_SHOAL = """An interrupted command stops and removes everything that it started. If `shoal run` could not collect the
checkpoints, their Docker volume stays, and the command says so. If several images fail in one `shoal build` or
`shoal push`, you get the code of the first one and a message for each.

Some commands end with another program's code:

- `shoal run`: the [code of the job](#train), so 3 can be the script's own. If the job has no result, the code is from
  the table above: it did not start, or Docker was lost. You then see no table of the job, and with `--json` only the
  error. `jobs/<name>/` has the files that could be collected.
- `shoal exec`: the code of the command that you name. `shoal shell`: the code of the shell.
- `shoal estimate`: 0 if a configuration fits, 1 if none does, 2 if the model cannot be planned.

`shoal run --detach` ends with 0 when the job has started, and `shoal ps` has the job's code later. `shoal logs` and
`shoal stop` end with 0, however the job ended.

## train

`train` ends with the same code on all hosts, which is usually the script's own. If a host is lost, the others end with
138. A host that an elastic job goes on without has its own code. The commands of ranks, such as `smddprun`, have
[their own codes](reference/launchers.md)."""
_RESUME = "start the job again: it continues from its [checkpoints](checkpoints.md)"
_OTHER = (
    "any other",
    "",
    "The script or its launcher ended with it. 128 + N: signal N killed a rank, such as 137 for lack of memory.",
    "read the failure file",
)


def write() -> str:
    """Returns the page.

    Raises:
        SystemExit: If two failures have one code, or a failure has no fix.
    """
    list_commands()  # imports every module that defines a failure
    shoal = [*_list_failures(), _describe_signals((signal.SIGINT, *EXIT_SIGNALS))]
    train = [*_list_constants(), _describe_signals(STOP_SIGNALS, _RESUME), _OTHER]
    return page(_HEAD, table(_COLUMNS, shoal), _SHOAL, table(_COLUMNS, train))


def _list_failures() -> Iterator[tuple[str, str, str, str]]:
    """Yields a row for each class of failures, sorted by code."""
    kinds = sorted(_list_kinds(ShoalError), key=lambda kind: kind.exit_code)
    for kind, other in zip(kinds, kinds[1:], strict=False):
        if kind.exit_code == other.exit_code:
            raise SystemExit(f"{kind.__name__} and {other.__name__} have one exit code. Fix: choose another for one.")
    for kind in kinds:
        yield _describe(kind.exit_code, kind.__name__, kind.__doc__ or "")


def _list_kinds(kind: type[ShoalError]) -> Iterator[type[ShoalError]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _list_kinds(each)


def _list_constants() -> Iterator[tuple[str, str, str, str]]:
    """Yields a row for each exit code in the toolkit's module of errors. The text after a constant describes it."""
    body = ast.parse(inspect.getsource(errors)).body
    for node, after in zip(body, body[1:], strict=False):
        if isinstance(node, ast.Assign) and isinstance(after, ast.Expr):
            yield _describe(ast.literal_eval(node.value), ast.unparse(node.targets[0]), ast.literal_eval(after.value))


def _describe(number: int, name: str, text: str) -> tuple[str, str, str, str]:
    """Returns a row from a docstring: the meaning, an empty line, and `Fix:`. Only 0 needs no fix."""
    meaning, _, fix = inspect.cleandoc(text).partition("\n\nFix: ")
    if number and not fix:
        raise SystemExit(f"{name} has no fix. Fix: add a paragraph `Fix: …` to its docstring.")
    return str(number), code(name), meaning, re.sub(r"docs/(\w+)\.md", r"[\1](\1.md)", fix)


def _describe_signals(signals: Iterable[signal.Signals], fix: str = "") -> tuple[str, str, str, str]:
    """Returns the row of the signals that stop a program from outside."""
    signals = sorted(signals)
    numbers = ", ".join(str(128 + each) for each in signals)
    return numbers, "", f"Stopped by {', '.join(each.name for each in signals)}.", fix
