"""docs/reference/buildspec.md: the keys of buildspec.yml and dockerfiles/versions.yml, from their JSON schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reference_pages.markdown import code, page, table

SCHEMAS = Path(__file__).resolve().parents[2] / "dockerfiles" / "schema"
FILES = {
    "buildspec.json": "buildspec.yml",
    "versions.json": "dockerfiles/versions.yml",
    "dropped.json": "dockerfiles/dropped.yml",
}
_HEAD = """# Image definitions

`make reference` writes this page from the JSON schemas in `dockerfiles/schema/`. Editors with a YAML language server
check the files while you write. `shoal` names the line of each mistake. `shoal init` writes copies that you can change
([install](../install.md#change-the-images)). To add a version of a framework, see
[contributing](../../CONTRIBUTING.md#add-a-framework-version)."""


def write() -> str:
    """Returns the page.

    Raises:
        SystemExit: If a key has no description.
    """
    return page(_HEAD, *(part for name, file in FILES.items() for part in _describe(file, name)))


def _describe(file: str, schema: str) -> Iterator[str]:
    document = json.loads((SCHEMAS / schema).read_text())
    yield f"## {file.rpartition('/')[2]}"
    _, _, task = document["description"].partition(": ")
    yield task[:1].upper() + task[1:]
    yield _table(file, document)
    for name, inner in document["$defs"].items():
        yield f"### {name}"
        yield inner["description"]
        yield _table(f"{file}: {name}", inner)


def _table(place: str, schema: dict[str, Any]) -> str:
    return table(("key", "value", "default", "meaning"), _rows(place, schema))


def _rows(place: str, schema: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    for key, field in schema["properties"].items():
        if "description" not in field:
            raise SystemExit(f"{place}: {key} has no description. Fix: write one in images/shoal/matrix/spec.py.")
        default = "required" if key in schema.get("required", ()) else _show(field.get("default"))
        yield code(key), _kind(field), default, field["description"]


def _show(default: Any) -> str:
    """A default; nothing for null, an empty list, and an object of nulls."""
    return code(json.dumps(default).strip('"')) if default and not isinstance(default, dict) else ""


def _kind(field: dict[str, Any]) -> str:
    """The kind of a value, in words."""
    if "anyOf" in field:
        return " or ".join(_kind(each) for each in field["anyOf"] if each.get("type") != "null")
    if "$ref" in field:
        return f"[{field['$ref'].rpartition('/')[2]}](#{field['$ref'].rpartition('/')[2].lower()})"
    if "enum" in field:
        return ", ".join(code(value) for value in field["enum"])
    if field["type"] == "array":
        return f"list: {_kind(field['items'])}"
    if field["type"] == "object":
        (inner,) = field.get("patternProperties", {"": field.get("additionalProperties")}).values()
        return f"object: {_kind(inner)}"
    return {"string": "text", "integer": "number", "boolean": "true or false"}[field["type"]]
