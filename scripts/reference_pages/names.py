"""docs/reference/python.md: the public names of `smdistributed`, from the source, and whether they work.

Reads the source without importing it, so that it needs no framework.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import tomllib

from reference_pages.markdown import code, page, table

LIBRARY = Path(__file__).resolve().parents[2] / "library"
VERSIONS = LIBRARY.parent / "docs" / "reference" / "interface-versions.toml"
WORKS, NO_EFFECT, UNSUPPORTED, MISSING = "works", "no effect", "not supported", "missing"
OURS = "–"
_DATA_TORCH = "[Python API](../api/dataparallel.md)"
_DATA_TENSORFLOW = "[signatures](../api/dataparallel-tensorflow.md), [data parallel in TensorFlow](../tensorflow.md)"
_MODEL_TORCH = "[signatures](../api/modelparallel.md), [model parallel in PyTorch](../modelparallel.md)"
_MODEL_TENSORFLOW = (
    "[signatures](../api/modelparallel-tensorflow.md), [model parallel in TensorFlow](../modelparallel-tensorflow.md)"
)
PACKAGES = {
    "smdistributed.dataparallel": _DATA_TORCH,
    "smdistributed.dataparallel.torch": _DATA_TORCH,
    "smdistributed.dataparallel.torch.distributed": _DATA_TORCH,
    "smdistributed.dataparallel.torch.parallel": _DATA_TORCH,
    "smdistributed.dataparallel.tensorflow": _DATA_TENSORFLOW,
    "smdistributed.dataparallel.tensorflow.keras": _DATA_TENSORFLOW,
    "smdistributed.dataparallel.tensorflow.keras.callbacks": _DATA_TENSORFLOW,
    "smdistributed.modelparallel.torch": _MODEL_TORCH,
    "smdistributed.modelparallel.torch.amp": _MODEL_TORCH,
    "smdistributed.modelparallel.torch.nn": _MODEL_TORCH,
    "smdistributed.modelparallel.torch.optimizers": _MODEL_TORCH,
    "smdistributed.modelparallel.torch.patches.checkpoint": _MODEL_TORCH,
    "smdistributed.modelparallel.torch.utils": _MODEL_TORCH,
    "smdistributed.modelparallel.tensorflow": _MODEL_TENSORFLOW,
}
"""The packages, and the pages that explain each."""
_HEAD = f"""# Names of `smdistributed`

`make reference` writes this page from the source. Each table lists the public names of a package:

- **{WORKS}**: as published by AWS. The linked page describes exceptions.
- **{NO_EFFECT}**: you can call it, and it warns.
- **{UNSUPPORTED}**: you can import it. If you use it, you get an error with an alternative.
- **{MISSING}**: AWS has the name, and you cannot import it.

The column "AWS" has the first version of AWS's interface that documents the name:

- `guide`: only AWS's guide has it, without a version.
- `scripts`: only scripts that AWS published have it.
- no number ({OURS}): it is Horovod's or ours.

[Release notes](releases.md): the version of the library, and AWS's versions with these names."""
_NO_NAMES = ("*", "annotations", "core")


class Definition(NamedTuple):
    """Where a name is defined: its module and syntax. For a module, `node` is its whole tree."""

    module: str
    node: ast.AST


def write() -> str:
    """Returns the page."""
    return page(_HEAD, *(part for package, link in PACKAGES.items() for part in _describe(package, link)))


def list_states(package: str) -> list[tuple[str, str]]:
    """Returns each public name of a package, and whether it works: WORKS, NO_EFFECT, UNSUPPORTED or "module".

    Args:
        package: A key of `PACKAGES`.
    """
    return [(name, explain(package, name)[0]) for name in list_names(package)]


def _describe(package: str, link: str) -> Iterator[str]:
    yield f"## {package}"
    yield f"{_first_line(read(package))} More: {link}."
    versions, listed = read_versions(package), list_names(package)
    rows = [(code(name), versions.get(name, OURS), *explain(package, name)) for name in listed]
    absent = [name for name in versions if name not in listed and "." not in name]
    rows += [(code(name), versions[name], MISSING, "") for name in absent]
    yield table(("name", "AWS", "here", "task"), rows)


def read_versions(package: str) -> dict[str, str]:
    """Returns AWS's version of each name of a package, and of methods as `Class.method`."""
    by_version: dict[str, str] = tomllib.loads(VERSIONS.read_text()).get(package, {})
    return {name: version for version, names in by_version.items() for name in names.split()}


def explain(package: str, name: str) -> tuple[str, str]:
    """Returns whether a name works, and the first line of its docstring."""
    module, node = find(package, name)
    if module.endswith(".unsupported"):
        return UNSUPPORTED, _first_line(node) or "For tensor parallelism."
    return state_of(node), _first_line(node) or _constant(package, name, node)


def _constant(package: str, name: str, node: ast.AST) -> str:
    """Describes a name that is assigned: the value that it stands for."""
    if isinstance(node, ast.Assign):
        value = node.value
        if isinstance(value, ast.Tuple) and isinstance(node.targets[0], ast.Tuple):
            names = [ast.unparse(each) for each in node.targets[0].elts]
            value = value.elts[names.index(name)]
        if isinstance(value, ast.Name):
            return f"Another name for {code(value.id)}."
        if isinstance(value, ast.Attribute):
            return f"{code(ast.unparse(value))}."
        return f"An object of {code(ast.unparse(value).partition('(')[0])}." if isinstance(value, ast.Call) else ""
    raise SystemExit(f"{package}.{name} has no docstring. Fix: write one, for docs/reference/python.md.")


def state_of(node: ast.AST) -> str:
    """Finds functions that only raise an error, and functions that warn and return their argument."""
    if isinstance(node, ast.Module):
        return "module"
    if not isinstance(node, ast.FunctionDef):
        return WORKS
    body = [each for each in node.body if not _is_docstring(each)]
    if isinstance(body[0], ast.Raise):
        return UNSUPPORTED
    return NO_EFFECT if ast.unparse(body[0]).startswith("warn_without_effect(") else WORKS


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _first_line(node: ast.AST) -> str:
    """Returns the first paragraph of a docstring, in one line; empty if there is none."""
    if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
        return ""
    return " ".join(inspect.cleandoc(ast.get_docstring(node) or "").split("\n\n")[0].split())


@functools.cache
def read(module: str) -> ast.Module:
    path = LIBRARY / module.replace(".", "/")
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


def _is_module(name: str) -> bool:
    path = LIBRARY / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


def list_names(package: str) -> list[str]:
    """Returns the names in `__all__`; without it, the names that a module imports (a package) or defines."""
    tree = read(package)
    listed = [name for node in tree.body for name in _listed_in(node, package)]
    defined = [each.name for each in tree.body if isinstance(each, (ast.ClassDef, ast.FunctionDef))]
    is_package = (LIBRARY / package.replace(".", "/")).is_dir()
    names = listed or defined or [name for name in _imports(package) if is_package]
    return sorted(
        {name for name in names if not name.startswith("_") and name not in _NO_NAMES},
        key=lambda name: (name.lower(), name),
    )


def _listed_in(node: ast.stmt, package: str) -> list[str]:
    """Returns the names that a statement puts into `__all__`: a list, or the `__all__` of an imported module."""
    if not isinstance(node, (ast.Assign, ast.AugAssign)):
        return []
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
    if not isinstance(target, ast.Name) or target.id != "__all__":
        return []
    if isinstance(node.value, ast.Attribute):
        return list_names(".".join(_imports(package)[ast.unparse(node.value.value)]))
    assert isinstance(node.value, ast.List)
    return [str(each.value) for each in node.value.elts if isinstance(each, ast.Constant)]


@functools.cache
def _imports(module: str) -> dict[str, tuple[str, str]]:
    """Returns the names that a module imports from the library: the module and the name there."""
    found = {}
    for node in read(module).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("smdistributed"):
            names = list_names(str(node.module)) if node.names[0].name == "*" else []
            found.update({name: (str(node.module), name) for name in names})
            found.update({each.asname or each.name: (str(node.module), each.name) for each in node.names})
    return found


def defines(module: str, name: str) -> bool:
    """Whether a module of the library defines a class or function, or imports it from another one."""
    return name in _imports(module) or any(getattr(node, "name", "") == name for node in read(module).body)


def find(module: str, name: str) -> Definition:
    """Follows imports to the definition of a name."""
    if name in _imports(module):
        source, original = _imports(module)[name]
        inner = f"{source}.{original}"
        return Definition(inner, read(inner)) if _is_module(inner) else find(source, original)
    for node in read(module).body:
        names = [node.name] if isinstance(node, (ast.ClassDef, ast.FunctionDef)) else []
        if isinstance(node, ast.Assign):
            names = [each.id for target in node.targets for each in ast.walk(target) if isinstance(each, ast.Name)]
        if name in names:
            return Definition(module, node)
    raise SystemExit(f"{module}.{name}: its definition was not found. Fix: extend scripts/reference_pages/names.py.")
