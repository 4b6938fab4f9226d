"""Pages of docs/api that are read from the source: signatures, docstrings, AWS's versions. They need no framework."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator

from reference_pages import names
from reference_pages.docstring_text import prose
from reference_pages.markdown import page
from reference_pages.signatures import show_definition

_MODEL_PARALLEL = "smdistributed.modelparallel"
PAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "dataparallel-tensorflow.md": (
        "[Data parallel training in TensorFlow](../tensorflow.md)",
        tuple(
            f"smdistributed.dataparallel.tensorflow{end}"
            for end in ("", ".keras", ".keras.callbacks", ".horovod", ".horovod.keras")
        ),
    ),
    "modelparallel.md": (
        "[Model parallel training in PyTorch](../modelparallel.md)",
        tuple(
            f"{_MODEL_PARALLEL}.torch{end}"
            for end in ("", ".amp", ".nn", ".nn.huggingface", ".optimizers", ".patches.checkpoint", ".utils")
        ),
    ),
    "modelparallel-tensorflow.md": (
        "[Model parallel training in TensorFlow](../modelparallel-tensorflow.md)",
        (f"{_MODEL_PARALLEL}.tensorflow", f"{_MODEL_PARALLEL}.tensorflow.utils"),
    ),
}
"""The guide and the packages of each page."""
_STATES = {names.NO_EFFECT: "no effect here", names.UNSUPPORTED: "not supported here"}


def write(name: str) -> str:
    """Returns a page.

    Args:
        name: A key of `PAGES`.
    """
    guide, packages = PAGES[name]
    head = (
        f"# {packages[0]}: Python API",
        "`make reference` writes this page from signatures and docstrings.",
        f"{guide} has the task. [All names](../reference/python.md) explains AWS's versions.",
    )
    described: dict[tuple[str, str], str] = {}
    return page(*head, *(part for package in packages for part in _package(package, described)))


def _package(package: str, described: dict[tuple[str, str], str]) -> Iterator[str]:
    """Describes a package. `described` has the place of each definition on the page, and gets this package's."""
    yield f"## {package}"
    yield prose(inspect.cleandoc(ast.get_docstring(names.read(package)) or ""))
    versions, listed = names.read_versions(package), names.list_names(package)
    for name in listed:
        yield from _name(package, name, versions, described)
    for name in versions:
        if name not in listed and "." not in name:
            yield f"### {name}\n\nAWS: {versions[name]}. Missing here."


def _name(package: str, name: str, versions: dict[str, str], described: dict[tuple[str, str], str]) -> Iterator[str]:
    yield f"### {name}"
    state, task = names.explain(package, name)
    about = _state(name, state, versions)
    home, node = names.find(package, name) if names.defines(package, name) else (package, None)
    if not isinstance(node, (ast.ClassDef, ast.FunctionDef)):
        yield f"{about} {task}"
        return
    place = described.setdefault((home, node.name), f"{package}.{name}")
    if place != f"{package}.{name}":
        yield f"{about} The same as `{place}`."
        return
    yield f"```python\n{show_definition(node)}\n```"
    yield about
    yield prose(inspect.cleandoc(ast.get_docstring(node) or ""))
    if isinstance(node, ast.ClassDef):
        yield from _methods(home, node, name, versions)


def _state(name: str, state: str, versions: dict[str, str]) -> str:
    version = f"AWS: {versions[name]}" if name in versions else "Not in AWS's library"
    return f"{version}{f', {_STATES[state]}' if state in _STATES else ''}."


def _methods(home: str, node: ast.ClassDef, name: str, versions: dict[str, str]) -> Iterator[str]:
    """Describes the methods of a class that AWS's pages or scripts have."""
    for full in versions:
        owner, _, method = full.partition(".")
        if owner != name or not method:
            continue
        found = _find_method(home, node, method)
        yield f"#### {full}"
        if found and found.name != method:
            yield f"{_state(full, names.state_of(found), versions)} The same as `{name}.{found.name}`."
        elif found:
            yield f"```python\n{show_definition(found)}\n```"
            yield _state(full, names.state_of(found), versions)
            yield prose(ast.get_docstring(found) or "")
        else:
            yield f"{_state(full, names.WORKS, versions)} An attribute, or a method of a class that {name} extends."


def _find_method(home: str, node: ast.ClassDef, method: str) -> ast.FunctionDef | None:
    """Looks in a class, and in its bases that are the library's. Another name of a method is that method."""
    for each in node.body:
        if isinstance(each, ast.Assign) and isinstance(each.value, ast.Name) and ast.unparse(each.targets[0]) == method:
            return _find_method(home, node, each.value.id)
        if isinstance(each, ast.FunctionDef) and each.name == method:
            return each
    for base in node.bases:
        if isinstance(base, ast.Name) and names.defines(home, base.id):
            module, parent = names.find(home, base.id)
            if isinstance(parent, ast.ClassDef):
                return _find_method(module, parent, method)
    return None
