"""docs/reference/releases.md: which of AWS's versions each version of the library follows, and which names work."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomllib

from reference_pages import names
from reference_pages.markdown import code, page, table

NOTES = Path(__file__).resolve().parents[2] / "docs" / "reference" / "releases.toml"
_INTERFACES = {
    "data-parallel-torch": "`smdistributed.dataparallel.torch`",
    "data-parallel-tensorflow": "`smdistributed.dataparallel.tensorflow`",
    "model-parallel-torch": "`smdistributed.modelparallel.torch`",
    "model-parallel-tensorflow": "`smdistributed.modelparallel.tensorflow`",
}
_HEAD = """# Release notes of `smdistributed`

These notes are about the library, the wheel `shoal-smdistributed`. [The changelog](../../CHANGELOG.md) is about all of
Shoal. `make reference` writes this page: versions, numbers and lists come from the source.

AWS numbers its data parallel and its model parallel library separately. The library here has one version of its own.
Scripts that look for AWS's number find it in `smdistributed.modelparallel.__version__`."""


def write() -> str:
    """Returns the page."""
    releases: list[dict[str, Any]] = tomllib.loads(NOTES.read_text())["release"]
    newest, current = releases[0]["version"], _read_version("smdistributed")
    if newest != current:
        raise SystemExit(
            f"docs/reference/releases.toml begins with version {newest}, and the library is {current}. "
            f"Fix: add a [[release]] with version {current} at its top."
        )
    older = (part for release in releases[1:] for part in _describe(release))
    return page(_HEAD, *_describe(releases[0]), *_list_facts(), *older)


def _describe(release: dict[str, Any]) -> Iterator[str]:
    yield f"## {release['version']} ({release['date']})"
    yield "\n".join(f"- {note}" for note in release["notes"])
    rows = ((title, release[key]) for key, title in _INTERFACES.items())
    yield table(("interface", "AWS's versions with these names"), rows)


def _list_facts() -> Iterator[str]:
    yield f"`smdistributed.modelparallel.__version__` is {code(_read_version('smdistributed.modelparallel'))}."
    states = {package: names.list_states(package) for package in names.PACKAGES}
    columns = (names.WORKS, names.NO_EFFECT, names.UNSUPPORTED)
    counts = {package: Counter(state for _, state in found) for package, found in states.items()}
    rows = ((code(package), *(str(count[column]) for column in columns)) for package, count in counts.items())
    yield table(("public names of", *columns), rows)
    yield "These names are not supported, or have no effect:"
    others = (
        (code(package), state, code(" ".join(name for name, found in pairs if found == state)))
        for package, pairs in states.items()
        for state in columns[1:]
        if counts[package][state]
    )
    yield table(("package", "here", "names"), others)
    yield "[All names](python.md) has a line for each, and [`mp_parameters`](mp-parameters.md) lists the keys."


def _read_version(package: str) -> str:
    """Reads `__version__` of a package without importing it."""
    path = names.LIBRARY / package.replace(".", "/") / "__init__.py"
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__":
            return str(ast.literal_eval(node.value))
    raise SystemExit(f"{path} has no __version__. Fix: write one.")
