"""docs/api/dataparallel.md: the signatures and docstrings of the modules, which are imported.

The file docs/api/variables.toml describes environment variables. It is an error if a variable is in the code and not in
that table, or in the table and not in the code. It is also an error if a public name has no docstring.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import tomllib

from reference_pages.docstring_text import prose
from reference_pages.signatures import show_definition, show_literal

ROOT = Path(__file__).resolve().parents[2]
VARIABLES = ROOT / "docs" / "api" / "variables.toml"
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

_VARIABLE = re.compile(
    r"(SMDDP|SMDATAPARALLEL|OMPI|PMIX|MASTER)_[A-Z_]+|(LOCAL_)?(RANK|WORLD_SIZE)"  # as a whole string
)
_HEAD = """# smdistributed.dataparallel: Python API

`make docs` writes this page from the docstrings. To begin, see [the examples](../../examples/README.md). "AWS developer
guide" and "published scripts" name the source of a behaviour.

[Release notes](../reference/releases.md): the version of the library, and AWS's versions with these names. To move a
script here, see [the guide](../migrate/smdistributed.md)."""


def write() -> str:
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
        yield prose(_docstring(module, name))
    for public in NAMES.get(name) or list_public(module):
        yield from _named(module, public)


def list_public(module: ModuleType) -> list[str]:
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
        yield f"### {name}\n\n```python\n{name} = {show_literal(value)}\n```"
    else:
        yield f"### {name}\n\n```python\n{_signature(value)}\n```"
        yield prose(_docstring(value, f"{module.__name__}.{name}"))


def _signature(value: Any) -> str:
    """The signature from the source. Evaluated annotations would differ between versions of the framework."""
    node = ast.parse(textwrap.dedent(inspect.getsource(value))).body[0]
    assert isinstance(node, (ast.ClassDef, ast.FunctionDef))
    return show_definition(node)


def _docstring(value: Any, name: str) -> str:
    text = vars(value).get("__doc__") if isinstance(value, type) else value.__doc__  # not inherited from a base class
    if not text:
        raise SystemExit(
            f"{name} has no docstring: describe shapes, dtypes, units, errors and the source of the behaviour."
        )
    return inspect.cleandoc(text)


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
