"""The walls between the rooms, as docs say them: who may import whom, and where frameworks may be imported."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FRAMEWORKS = {"torch", "tensorflow"}
FLOORS: tuple[frozenset[str], ...] = tuple(
    frozenset(floor.split())
    for floor in (
        "errors",
        "matrix",
        "network docker_client layers",
        "sources",
        "builds jobs inspection report scaffold",
        "doctor",
        "commands",
        "cli",
    )
)
"""The rooms of `shoal`, lowest first: a room imports from those of lower floors, and nothing beside or above it."""


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: import by absolute name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def offences(room: str, forbidden: tuple[str, ...]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules(room)
        for name in imports(path)
        if any(name == word or name.startswith(f"{word}.") for word in forbidden)
    ]


@pytest.mark.parametrize(
    ("room", "forbidden"),
    [
        ("images", ("shoal_toolkit", "smdistributed", "torch", "tensorflow")),
        ("toolkit", ("shoal", "smdistributed", "torch", "tensorflow")),
        ("library", ("shoal", "shoal_toolkit")),
        (
            "library/smdistributed/core",
            ("smdistributed.dataparallel", "smdistributed.modelparallel", "smdistributed.rehearsal"),
        ),
        ("library/smdistributed/dataparallel", ("smdistributed.modelparallel", "smdistributed.rehearsal")),
        ("library/smdistributed/modelparallel", ("smdistributed.dataparallel", "smdistributed.rehearsal")),
        (
            "library/smdistributed/modelparallel/backend",
            ("smdistributed.modelparallel.torch", "smdistributed.modelparallel.tensorflow"),
        ),
        ("library/smdistributed/rehearsal", ("smdistributed.dataparallel", "smdistributed.modelparallel")),
    ],
)
def test_rooms_do_not_import_each_other(room: str, forbidden: tuple[str, ...]) -> None:
    assert modules(room)
    assert offences(room, forbidden) == []


def test_frameworks_are_imported_only_under_the_folder_of_that_name() -> None:
    for path in modules("library"):
        parts = path.relative_to(ROOT).parts
        for name in imports(path):
            top = name.removeprefix("smdistributed.core.").split(".")[0]  # the engine has such folders too
            assert top not in FRAMEWORKS or top in parts, f"{path.relative_to(ROOT)} imports {name}"


def test_the_toolkit_needs_the_standard_library_only() -> None:
    """But for boto3, an extra, which one module imports when it is called."""
    allowed = sys.stdlib_module_names | {"shoal_toolkit"}
    for path in modules("toolkit"):
        for name in imports(path):
            extra = path.name == "s3.py" and name.split(".")[0] in ("boto3", "botocore")
            assert extra or name.split(".")[0] in allowed, f"{path.relative_to(ROOT)} imports {name}"


def _floor(room: str) -> int:
    return next(number for number, rooms in enumerate(FLOORS) if room in rooms)


def test_the_rooms_of_shoal_import_downwards_only() -> None:
    seen = set()
    for path in modules("images/shoal"):
        room = path.relative_to(ROOT / "images/shoal").parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        seen.add(room)
        for name in imports(path):
            other = name.split(".")[1] if name.startswith("shoal.") and name != "shoal.__version__" else room
            below = other == room or _floor(other) < _floor(room)
            assert below, f"{path.relative_to(ROOT)} imports {name}"
    assert seen == frozenset().union(*FLOORS)
