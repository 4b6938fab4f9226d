"""Writes docs/api/dataparallel.md from the library's signatures and docstrings. `--check` writes nothing.

The file docs/api/variables.toml describes environment variables. It is an error if a variable is in the code and not in
that table, or in the table and not in the code. It is also an error if a public name has no docstring.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import tomllib

ROOT = Path(__file__).resolve().parents[1]
PAGE, VARIABLES = ROOT / "docs" / "api" / "dataparallel.md", ROOT / "docs" / "api" / "variables.toml"
PACKAGE = "smdistributed.dataparallel"
MODULES = (
    PACKAGE,
    f"{PACKAGE}.torch.torch_smddp",
    f"{PACKAGE}.torch",
    f"{PACKAGE}.torch.compression",
    f"{PACKAGE}.torch.distributed",
    f"{PACKAGE}.torch.parallel",
    f"{PACKAGE}.torch.parallel.distributed",
    f"{PACKAGE}.exceptions",
    "smdistributed.core.launch",
)
NAMES = {"smdistributed.core.launch": ["LaunchError"]}
"""The public names of modules that document only some of them."""
SOURCES = ("core", "dataparallel")
LINE = 100

_VARIABLE = re.compile(
    r"(SMDDP|SMDATAPARALLEL|OMPI|PMIX|MASTER)_[A-Z_]+|(LOCAL_)?(RANK|WORLD_SIZE)"  # as a whole string
)
_PARAMETERS = re.compile(r"^(\w+(?:, \w+)*): ")
_ENTRY = re.compile(r"^(\*{0,2}[\w.]+(?:, \*{0,2}[\w.]+)*)(?: \([^)]*\))?: ", re.MULTILINE)
_HEAD = """# smdistributed.dataparallel: Python API

`make docs` writes this page from the docstrings. To begin, see [the examples](../../examples/README.md). "AWS developer
guide" and "published scripts" name the source of a behaviour.

[Release notes](../reference/releases.md): the version of the library, and AWS's versions with these names. To move a
script here, see [the guide](../migrate/smdistributed.md)."""


def page() -> str:
    """Returns the whole page.

    Returns:
        The page in Markdown.

    Raises:
        SystemExit: If a docstring or a variable is missing.
    """
    parts = [_HEAD, *(text for module in MODULES for text in _module(module)), *_variables()]
    return "\n".join(part.rstrip() + "\n" for part in parts)


def _module(name: str) -> Iterator[str]:
    module = importlib.import_module(name)
    yield f"## {name}"
    if name not in NAMES:
        yield _prose(_docstring(module, name))
    for public in NAMES.get(name) or _public(module):
        yield from _named(module, public)


def _public(module: ModuleType) -> list[str]:
    """The names in `__all__`. If there is none: the names that the module itself defines."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    return [name for name in vars(module) if not name.startswith("_") and _is_of(module, name)]


def _is_of(module: ModuleType, name: str) -> bool:
    value = getattr(module, name)
    if isinstance(value, (str, int, float)):
        return name.isupper() and name != "TYPE_CHECKING"
    return getattr(value, "__module__", None) == module.__name__ and callable(value)


def _named(module: ModuleType, name: str) -> Iterator[str]:
    value = getattr(module, name)
    home = getattr(value, "__module__", module.__name__)
    if home != module.__name__ and home in MODULES:
        yield f"### {name}\n\nThe same as `{home}.{name}`."
    elif not callable(value):
        yield f"### {name}\n\n```python\n{name} = {_literal(value)}\n```"
    else:
        yield f"### {name}\n\n```python\n{_signature(value)}\n```"
        yield _prose(_docstring(value, f"{module.__name__}.{name}"))


def _signature(value: Any) -> str:
    """The signature from the source. Evaluated annotations would differ between versions of the framework."""
    node = ast.parse(textwrap.dedent(inspect.getsource(value))).body[0]
    if isinstance(node, ast.FunctionDef):
        return _shown("def ", node)
    assert isinstance(node, ast.ClassDef)
    if issubclass(value, Enum):
        members = [f"{each.name} = {_literal(each.value)}" for each in value]
        return "\n    ".join([f"class {node.name}(Enum):", *members])
    bases = ", ".join(map(ast.unparse, node.bases))
    initial = next((each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"), None)
    if initial is None:
        fields = [ast.unparse(each) for each in node.body if isinstance(each, ast.AnnAssign)]
        return "\n    ".join([f"class {node.name}{bases and f'({bases})'}{':' if fields else ''}", *fields])
    initial.name, initial.returns, initial.args.args = node.name, None, initial.args.args[1:]
    return _shown("class ", initial)


def _literal(value: object) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _shown(word: str, function: ast.FunctionDef) -> str:
    """One line. If that is too long: a line for each parameter."""
    returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    given = function.args
    assert not given.kwonlyargs, f"{function.name}: say how to show arguments that are given by keyword only"
    every = (*given.posonlyargs, *given.args)
    defaults = [None] * (len(every) - len(given.defaults)) + [*given.defaults]
    parameters = [
        f"{ast.unparse(each)} = {ast.unparse(default)}" if default else ast.unparse(each)
        for each, default in zip(every, defaults)
    ]
    parameters += [star + ast.unparse(rest) for star, rest in (("*", given.vararg), ("**", given.kwarg)) if rest]
    line = f"{word}{function.name}({', '.join(parameters)}){returns}"
    if len(line) <= LINE:
        return line
    return "\n".join([f"{word}{function.name}(", *(f"    {each}," for each in parameters), f"){returns}"])


def _docstring(value: Any, name: str) -> str:
    text = vars(value).get("__doc__") if isinstance(value, type) else value.__doc__  # not inherited from a base class
    if not text:
        raise SystemExit(
            f"{name} has no docstring: describe shapes, dtypes, units, errors and the source of the behaviour."
        )
    return inspect.cleandoc(text)


def _prose(text: str) -> str:
    """A docstring as Markdown: its sections become lists."""
    head, *sections = re.split(r"^(?=(?:Args|Attributes|Returns|Yields|Raises|Examples?):$)", text, flags=re.MULTILINE)
    return "\n\n".join(part for part in (_paragraphs(head.rstrip()), *map(_section, sections)) if part)


def _section(text: str) -> str:
    """A section such as `Args:` with its indented body, as Markdown."""
    heading, _, body = text.partition("\n")
    body, name = textwrap.dedent(body).strip(), heading.rstrip(":")
    if name.startswith("Example"):
        return f"{heading}\n\n```python\n{body}\n```"
    if name in ("Args", "Attributes", "Raises") and _ENTRY.match(body):
        items = re.split(r"\n(?=\S)", body)
        return f"{heading}\n\n" + "\n".join(
            _ENTRY.sub(_item, re.sub(r"\n\s*", "\n  ", each), count=1) for each in items
        )
    return f"{heading} {' '.join(body.split())}" if "\n\n" not in body else f"{heading}\n\n{body}"


def _item(entry: re.Match[str]) -> str:
    return f"- {', '.join(f'`{name}`' for name in entry[1].split(', '))}: "


def _paragraphs(text: str) -> str:
    """Text before the sections. Lines that begin with parameters become a list."""
    lines: list[str] = []
    in_list = False
    for line in text.splitlines():
        found = _PARAMETERS.match(line)
        if found and (in_list or not lines[-1:] or not lines[-1]):
            names = ", ".join(f"`{name}`" for name in found[1].split(", "))
            line, in_list = f"- {names}: {line[found.end() :]}", True
        elif in_list and line.startswith(" "):
            line = f"  {line.strip()}"
        else:
            in_list = False
        lines.append(line)
    return "\n".join(lines)


def _variables() -> Iterator[str]:
    table = tomllib.loads(VARIABLES.read_text())
    listed = {name for group in table.values() for name in group}
    for name in sorted(_named_in_code() ^ listed):
        where = "the library's code" if name in listed else f"docs/api/{VARIABLES.name}"
        raise SystemExit(f"The environment variable {name} is missing in {where}: add it there, or remove it here.")
    yield "## Environment variables"
    for heading, variables in table.items():
        rows = [f"| `{name}` | {' '.join(meaning.split())} |" for name, meaning in variables.items()]
        yield "\n".join([f"### {heading}", "", "| variable | |", "|---|---|", *rows])


def _named_in_code() -> set[str]:
    paths = [path for part in SOURCES for path in (ROOT / "library" / "smdistributed" / part).rglob("*.py")]
    return {
        node.value
        for path in paths
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _VARIABLE.fullmatch(node.value)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is stale")
    check = parser.parse_args().check
    text = page()
    if not check:
        PAGE.write_text(text)
    elif not PAGE.exists() or PAGE.read_text() != text:
        sys.exit(f"{PAGE.relative_to(ROOT)} is stale. Fix: run `make docs` and commit the page.")


if __name__ == "__main__":
    main()
