"""docs/reference/json.md: the documents that commands print with `--json`, from the classes that hold them."""

from __future__ import annotations

import ast
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import pydantic

from reference_pages.commands import list_commands
from reference_pages.markdown import code, page, table, wrap
from shoal import doctor, scaffold
from shoal.builds import builder, bundle, debian_lock, listing, push
from shoal.commands import dependencies
from shoal.image import advisories, differences, manifest, size_document
from shoal.jobs import store
from shoal.jobs.hosts import docker
from shoal.matrix import project
from shoal.sources import lock, record, render
from shoal_toolkit.plan.explain import ExplainedPlan
from smdistributed.modelparallel.__main__ import Estimate

_HEAD = """# Documents of `--json`

`make reference` writes this page from the code. With `--json`, a command prints one document on standard output, and
everything else on standard error. [Exit codes](../exit-codes.md) stay the same, and failures are in the document too.
If a command fails before it has a result, the document is an object with `error` and `exit_code`. An interrupted
command, and one with an unknown option, print none. `set -o pipefail` keeps the exit code in a pipe to `jq`. A value
that is not known is `null`.

The output of `shoal sbom` is always JSON: a bill of materials of [CycloneDX](https://cyclonedx.org) 1.5."""


class Field(NamedTuple):
    """A field of a document: its name, its Python type and its meaning."""

    name: str
    type: Any
    meaning: str


_RESULTS: Mapping[str, Callable[..., Any] | str] = {
    "list": listing.list_images,
    "render": render.write_files,
    "build --dry-run": record.Decision,
    "build": builder.build_images,
    "push": push.push_image,
    "bundle": bundle.fill_bundle,
    "lock": lock.LockedImages,
    "lock --bases": debian_lock.lock_systems,
    "upgrade": dependencies.Upgrade,
    "cache prune": project.prune_cache,
    "doctor": doctor.run_checks,
    "new": scaffold.write_project,
    "init": scaffold.write_definitions,
    "run": docker.run_job_in_docker,
    "ps": store.KnownJob.describe,
    "run --detach": "ps",
    "stop": "ps",
    "estimate": Estimate,
    "inspect": manifest.make_manifest,
    "audit": advisories.audit,
    "size": size_document.make_document,
    "diff": differences.compare_images,
    "timeline": "",
    "train --explain": ExplainedPlan,
}
"""The function or class that makes the document of each command, or a command with the same one."""
_LISTS = ("build --dry-run", "push", "ps")
"""Commands that print a list with an entry for each call of their function."""
_LEFT_OUT = {"run": ("`plan`",)}
_PROPERTIES = {"diff": ("unexpected", "unexplained")}
_NOTES = {
    "new": "The paths of the files that were written.",
    "init": "The paths that were written.",
    "run": "The hosts' logs are on standard error.",
    "inspect": "With `-o`, it goes into that file.",
    "timeline": "A list of events in the Trace Event Format of Chrome, in a file next to the page. `pid` is the rank. "
    "[Timeline](../timeline.md#read) explains them.",
}
_WORDS = {str: "text", int: "number", float: "number", bool: "true, false"}


def write() -> str:
    """Returns the page.

    Raises:
        SystemExit: If a command has the option `--json`, and its document is not described here.
    """
    for name, command in list_commands():
        if name.removeprefix("shoal ") not in _RESULTS and any("--json" in each.opts for each in command.params):
            raise SystemExit(f"The document of `{name} --json` has no description. Fix: add it to {__file__}.")
    return page(_HEAD, *(part for name, maker in _RESULTS.items() for part in _describe(name, maker)))


def _describe(name: str, maker: Callable[..., Any] | str) -> Iterator[str]:
    yield f"## {name}" if name.startswith("train") else f"## shoal {name}"
    note = _NOTES.get(name, "")
    if isinstance(maker, str):
        yield wrap(f"An object, as in the list of [shoal {maker}](#shoal-{maker})." if maker else note)
        return
    result = maker if isinstance(maker, type) else typing.get_type_hints(maker)["return"]
    kind = (typing.get_args(result) or (result,))[0]
    if not _find_classes(kind):
        yield f"A list of {name_type(kind)}. {note}"
        return
    form = "A list. Each entry is an object." if name in _LISTS or kind is not result else "An object."
    yield wrap(f"{form} {_first_sentences(kind)} {note}")
    rows = [row for row in _rows(kind) if row[0] not in _LEFT_OUT.get(name, ())]
    rows += [_describe_property(kind, each) for each in _PROPERTIES.get(name, ())]
    yield table(("key", "value", "meaning"), rows)


def _rows(kind: type, place: str = "") -> Iterator[tuple[str, str, str]]:
    """Yields a row for each field, and after an object the rows of its own fields."""
    for field in list_fields(kind):
        yield code(place + field.name), name_type(field.type), field.meaning
        for inner in _find_classes(field.type):
            yield from _rows(inner, f"{place}{field.name}.")


def _describe_property(kind: type, name: str) -> tuple[str, str, str]:
    found = getattr(kind, name)
    return code(name), name_type(typing.get_type_hints(found.fget)["return"]), found.__doc__


def list_fields(kind: type) -> list[Field]:
    """Returns the fields of a dataclass or a model, and of its bases. The text after a field is its meaning."""
    hints = typing.get_type_hints(kind)
    meanings: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        if each is not pydantic.BaseModel and "__annotations__" in vars(each):
            meanings.update(_read_meanings(each))
    return [Field(name, hints[name], meaning) for name, meaning in meanings.items()]


def _read_meanings(kind: type) -> Iterator[tuple[str, str]]:
    """Yields the name of each field that a class itself has, and the text after it."""
    tree = ast.parse(inspect.getsource(kind)).body[0]
    assert isinstance(tree, ast.ClassDef)
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            yield node.target.id, str(text).replace("None:", "null:").replace("None if", "null if")


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
    """Returns the dataclasses, models and named tuples in a type."""
    if any(hasattr(kind, name) for name in ("__dataclass_fields__", "model_fields", "_fields")):
        return [kind]
    return [found for each in typing.get_args(kind) for found in _find_classes(each)]


def _first_sentences(kind: type) -> str:
    """Returns the first paragraph of a docstring, in one line."""
    return " ".join(inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0].split())
