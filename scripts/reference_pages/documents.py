"""docs/reference/json.md: the documents that commands print with `--json`, from the classes that hold them."""

from __future__ import annotations

import ast
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from reference_pages.markdown import code, page, table, wrap
from shoal import doctor
from shoal.builds import builder, bundle, cache, debian_lock, listing, push
from shoal.inspection import advisories, differences, manifest
from shoal.jobs import docker_job
from shoal.sources import render

_HEAD = """# Documents of `--json`

`make reference` writes this page from the code. With `--json`, a command prints one document on standard output, and
everything else on standard error. Exit codes stay the same: [exit codes and JSON](../exit-codes.md) also describes the
documents that are not in this list. A value that is not known is `null`."""


class Field(NamedTuple):
    """A field of a document: its name, its Python type and its meaning."""

    name: str
    type: Any
    meaning: str


_RESULTS: Mapping[str, Callable[..., Any]] = {
    "list": listing.list_images,
    "render": render.write_files,
    "build --dry-run": builder.plan_images,
    "build": builder.build_images,
    "push": push.push_image,
    "bundle": bundle.fill_bundle,
    "lock --bases": debian_lock.lock_systems,
    "cache prune": cache.prune_cache,
    "doctor": doctor.run_checks,
    "run": docker_job.run_job_in_docker,
    "inspect": manifest.make_manifest,
    "audit": advisories.find_vulnerabilities,
    "diff": differences.compare_images,
}
"""The function that makes the document of each command."""
_LISTS = ("push",)
"""Commands that print a list with an entry for each call of their function."""
_LEFT_OUT = {"run": ("`plan`",)}
_NOTES = {
    "run": "The document also has `build_seconds`, the seconds of `--build`.",
    "audit": "These are the `findings` of the document. Each also has `counts`: whether it causes the exit code 12. "
    "The document also has `tag`, and `unused` and `unaudited` ([exit codes and JSON](../exit-codes.md)).",
    "diff": "The document also has `unexpected` and `unexplained`: the paths that make `--check` fail, and the paths "
    "that no package explains.",
}
_WORDS = {str: "text", int: "number", float: "number", bool: "true, false"}


def write() -> str:
    """Returns the page."""
    return page(_HEAD, *(part for name, function in _RESULTS.items() for part in _describe(name, function)))


def _describe(name: str, function: Callable[..., Any]) -> Iterator[str]:
    result = typing.get_type_hints(function)["return"]
    kind = (typing.get_args(result) or (result,))[0]
    is_list = name in _LISTS or kind is not result
    yield f"## shoal {name}"
    form = "A list. Each entry is an object." if is_list else "An object."
    yield wrap(f"{form} {_first_sentences(kind)} {_NOTES.get(name, '')}")
    yield table(("key", "value", "meaning"), (row for row in _rows(kind) if row[0] not in _LEFT_OUT.get(name, ())))


def _rows(kind: type) -> Iterator[tuple[str, str, str]]:
    """Yields a row for each field, and after an object the rows of its own fields."""
    for field in list_fields(kind):
        yield code(field.name), name_type(field.type), field.meaning
        for inner in _find_classes(field.type):
            for each in list_fields(inner):
                yield code(f"{field.name}.{each.name}"), name_type(each.type), each.meaning


def list_fields(kind: type) -> list[Field]:
    """Returns the fields of a dataclass or a model. The text after a field is its meaning."""
    tree = ast.parse(inspect.getsource(kind)).body[0]
    assert isinstance(tree, ast.ClassDef)
    hints = typing.get_type_hints(kind)
    fields = []
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            meaning = str(text).replace("None:", "null:").replace("None if", "null if")
            fields.append(Field(node.target.id, hints[node.target.id], meaning))
    return fields


def name_type(kind: Any) -> str:
    """Returns the JSON type of a Python type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return ", ".join(code(value) for value in arguments)
    if origin in (types.UnionType, typing.Union):
        return " or ".join("null" if each is type(None) else name_type(each) for each in arguments)
    if inspect.isclass(origin) and issubclass(origin, Mapping):
        return "object" if arguments[1] is Any else f"object of {name_type(arguments[1])}"
    if inspect.isclass(origin) and issubclass(origin, Iterable):
        return f"list of {name_type(arguments[0])}"
    return _WORDS.get(kind, "object" if _find_classes(kind) or origin else "text")


def _find_classes(kind: Any) -> list[type]:
    """Returns the dataclasses and models in a type."""
    if hasattr(kind, "__dataclass_fields__") or hasattr(kind, "model_fields"):
        return [kind]
    return [found for each in typing.get_args(kind) for found in _find_classes(each)]


def _first_sentences(kind: type) -> str:
    """Returns the first paragraph of a docstring, in one line."""
    return " ".join(inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0].split())
