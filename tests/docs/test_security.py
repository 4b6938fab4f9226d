"""docs/security.md promises nothing without a test: each row of its tables names tests, and all of them exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()
DEFINED = {
    name
    for path in (ROOT / "tests").rglob("*.py")
    for name in (*re.findall(r"^ *def (test_\w+)", path.read_text(), re.MULTILINE), path.name, path.stem)
}


def list_rows() -> list[str]:
    """Return the rows of the tables whose last column is called Test."""
    rows: list[str] = []
    for table in re.findall(r"(?:^\|.*\n)+", PAGE, re.MULTILINE):
        head, _, *body = table.splitlines()
        if head.endswith("| Test |"):
            rows += body
    return rows


def find_unknown(names: list[str]) -> list[str]:
    """Return the names of tests that do not exist. With …, a part of a name is enough."""
    return [name for name in names if not any(name.strip("…") in each for each in DEFINED)]


def names_of(text: str) -> list[str]:
    """Return the names of tests, and of their files, in a text."""
    quoted = re.findall(r"`([^`\s]+)`", text)
    parts = [part for word in quoted for part in word.split("::")[-1:]]
    return [part.rpartition("/")[2].removesuffix(".py") for part in parts if re.search(r"(^|/)test_|^…|/ranks/", part)]


def test_each_row_names_its_tests() -> None:
    rows = list_rows()
    assert len(rows) > 70
    without = [row for row in rows if not (names_of(row.rsplit("|", 2)[1]) or "the same test" in row.rsplit("|", 2)[1])]
    assert not without


def test_each_named_test_exists() -> None:
    unknown = find_unknown(names_of(PAGE))
    assert not unknown
