"""The tables of names in docs/migrate/smdistributed.md, from the source of the library."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import tomllib

from reference_pages import names
from reference_pages.markdown import code, table

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "migrate" / "smdistributed.md"
SUCCESSORS = ROOT / "docs" / "reference" / "migration.toml"


def write() -> str:
    """Returns the page with fresh tables between its markers `<!-- NAME -->` and `<!-- /NAME -->`."""
    text = PAGE.read_text()
    tables = {"successors": _list_successors(), **{package: list_by_state(package) for package in names.PACKAGES}}
    for marker, content in tables.items():
        before, found, rest = text.partition(f"<!-- {marker} -->\n")
        if found:
            text = f"{before}{found}\n{content}\n\n<!-- /{marker} -->{rest.partition(f'<!-- /{marker} -->')[2]}"
    return text


def list_by_state(package: str) -> str:
    """Returns a table of a package: each state, and the names that have it.

    Args:
        package: A key of `names.PACKAGES`.
    """
    states: dict[str, list[str]] = {}
    for name, state in names.list_states(package):
        states.setdefault(state, []).append(name)
    return table(("here", "names"), ((state, code(" ".join(found))) for state, found in states.items()))


def _list_successors() -> str:
    rows = [row for package, successors in _read_successors() for row in _list_rows(package, successors)]
    return table(("first generation", "here", "backend `smddp`"), rows)


def _read_successors() -> Iterator[tuple[str, dict[str, str]]]:
    for package, successors in tomllib.loads(SUCCESSORS.read_text()).items():
        known = {name for name, _ in names.list_states(package)}
        for name in sorted(known ^ set(successors)):
            problem = "has no entry" if name in known else "is not in the library"
            raise SystemExit(f"{package}.{name} {problem}. Fix: edit docs/reference/migration.toml.")
        yield package, successors


def _list_rows(package: str, successors: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    short = package.removeprefix("smdistributed.dataparallel.torch.")
    for name, state in names.list_states(package):
        yield code(f"{short}.{name}"), state, successors[name]
