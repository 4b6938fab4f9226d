"""Where the files of two images differ: what is read of a file, and what is told of it."""

from __future__ import annotations

import os
import py_compile
import stat
from pathlib import Path
from py_compile import PycInvalidationMode
from typing import Any

import pytest

from shoal.inside import differences, files_probe
from shoal.inside.differences import File

FILE: dict[str, Any] = {"mode": 0o100644, "uid": 0, "gid": 0, "time": 5, "content": "ab", "source_time": 0}


def read(directory: Path) -> dict[str, File]:
    """As in a container whose root the directory is."""
    found = files_probe.below(str(directory), directory.stat().st_dev)
    return {path.removeprefix(str(directory)): File(**files_probe.about(path, about)) for path, about in found}


def test_bytecode_is_the_same_but_for_its_sources_time(tmp_path: Path) -> None:
    for number, text in enumerate(("a = 1\n", "a = 1\n", "a = 2\n")):
        source = tmp_path / str(number) / "m.py"
        source.parent.mkdir()
        source.write_text(text)
        os.utime(source, (1000 + number, 1000 + number))
        made = str(source.with_suffix(".pyc"))
        py_compile.compile(str(source), made, dfile="m.py", invalidation_mode=PycInvalidationMode.TIMESTAMP)
    first, second, third = (read(tmp_path / str(number))["/m.pyc"] for number in range(3))
    assert (first.source_time, second.source_time) == (1000, 1001)
    assert first.content == second.content
    assert first.content != third.content


def test_links_directories_and_modes_are_read(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir(mode=0o750)
    (tmp_path / "d" / "f").write_text("x")
    (tmp_path / "d" / "l").symlink_to("/nowhere")
    found = read(tmp_path)
    assert found.keys() == {"/d", "/d/f", "/d/l"}
    assert found["/d/l"].content == "/nowhere"
    assert stat.S_ISDIR(found["/d"].mode)
    assert stat.S_IMODE(found["/d"].mode) == 0o750


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"content": "cd", "mode": 0o100755, "time": 6}, "content"),
        ({"mode": 0o100755, "time": 6}, "owner or mode"),
        ({"gid": 7}, "owner or mode"),
        ({"source_time": 6, "time": 6}, "bytecode's time"),
        ({"time": 6}, "time"),
    ],
)
def test_a_file_differs_in_the_first_of_these(changes: dict[str, Any], kind: str) -> None:
    same = File(**FILE)
    found = differences.compare("a:1", "a:2", {"/f": same, "/g": same}, {"/f": File(**{**FILE, **changes}), "/g": same})
    assert found.found == {"/f": kind}
    assert bool(found.unexpected) == (kind not in ("bytecode's time", "time"))


def test_only_some_are_told_by_name() -> None:
    same = File(**FILE)
    lines = list(differences.told(differences.compare("a", "b", {}, {f"/{number}": same for number in range(60)})))
    assert sum(line.startswith("✗ added: ") for line in lines) == 50
    assert lines[-1] == "✗ and 10 more, which --json names"


def test_what_is_told() -> None:
    same, later = File(**FILE), File(**{**FILE, "time": 6})
    found = differences.compare(
        "a:1", "a:2", {"/f": same, "/g": same, "/old": same}, {"/f": same, "/g": later, "/new": same}
    )
    lines = list(differences.told(found))
    assert lines[0] == "a:1\na:2"
    assert lines[1].split()[0] == "1"
    assert any(line.endswith("1 differ: time (a file has the time at which it was installed)") for line in lines)
    assert lines[-2:] == ["✗ added: /new", "✗ removed: /old"]
    assert list(differences.told(differences.compare("a", "b", {"/f": same}, {"/f": later})))[-1].startswith("✓")
