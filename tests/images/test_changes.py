"""Changes in a source, which start a run of `shoal run --watch` again."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from shoal.commands.watch import _leave_out_written
from shoal.jobs.changes import Changes
from shoal.jobs.job import JobRequest
from shoal.jobs.source_files import Selection
from shoal.jobs.volumes import Volume

from ..waiting import SECONDS

EDITORS = {
    "in place": lambda path, text: path.write_text(text),
    "by rename": lambda path, text: (path.with_name("x~").write_text(text), path.with_name("x~").rename(path)),
    "by removal": lambda path, text: (path.rename(path.with_name("x~")), path.write_text(text)),
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for name in ("train.py", "data/a.txt", "lib/deep/model.py"):
        write(tmp_path / name, "1")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def watch(source: Path) -> Changes:
    return Changes(Selection(source, "train.py", elsewhere=(source / "jobs",)))


@pytest.mark.parametrize("save", EDITORS.values(), ids=EDITORS)
def test_a_file_that_an_editor_has_written_is_named(source: Path, save: object) -> None:
    changes = watch(source)
    assert changes.find() == []
    save(source / "lib/deep/model.py", "changed")  # type: ignore[operator]
    assert changes.find() == ["lib/deep/model.py"]
    assert changes.find() == []


def test_new_and_removed_files_are_named(source: Path) -> None:
    changes = watch(source)
    write(source / "new/one.py", "")
    (source / "data/a.txt").unlink()
    (source / "train.py").chmod(0o755)
    assert changes.find() == ["data/a.txt (removed)", "new/one.py (new)", "train.py"]


def test_a_file_with_an_old_time_in_place_of_another_is_a_change(source: Path) -> None:
    changes = watch(source)
    times = (source / "train.py").stat()
    write(source / "other", "2")
    os.utime(source / "other", ns=(times.st_atime_ns, times.st_mtime_ns))
    (source / "other").replace(source / "train.py")
    assert changes.find() == ["train.py"]


@pytest.mark.parametrize(
    "name",
    [
        *(".git/index", "__pycache__/train.pyc", "lib/__pycache__/x.pyc", "jobs/digits/report.html", ".env"),
        *(".train.py.swp", "train.py~", "4913", "lib/.#model.py", ".idea/workspace.xml"),
        *("cache/x", "lib/run.log", "only/here/x", "docs/a.html"),
    ],
)
def test_files_that_nobody_edits_start_no_run(source: Path, name: str) -> None:
    """Outputs, bytecode, files of git and of editors, and files that .gitignore or .dockerignore name."""
    write(source / ".gitignore", "*.log\ncache/\n/only/here\n# *.py\n!keep.log\n")
    write(source / ".dockerignore", "docs/*.html\n")
    changes = watch(source)
    write(source / name, "x")
    assert changes.find() == []
    write(source / "lib/keep.log", "x")
    assert changes.find() == ["lib/keep.log (new)"], "it is excepted from a pattern"


@pytest.mark.parametrize(
    "pattern", ["*a" * 4 + "b", "**/" * 80 + "x", "[z-a]", "[", "x" * 10_000, "!", "/", "..", "**"]
)
def test_patterns_of_others_take_no_time_and_end_no_command(source: Path, pattern: str) -> None:
    for name in ("a" * 200, "/".join(["a" * 60] * 40)):
        write(source / name, "")
    for name in (".gitignore", ".dockerignore"):
        write(source / name, f"{pattern}\n*.log\n")
    began = time.process_time()
    changes = watch(source)
    write(source / "train.py", "2")
    write(source / "run.log", "2")
    assert changes.find() == ([] if pattern == "**" else ["train.py"])
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    ("pattern", "ignored"),
    [
        ("lib", ["lib/deep/model.py"]),
        ("**/deep/**", ["lib/deep/model.py"]),
        ("lib/*/model.p[xy]", ["lib/deep/model.py"]),
        ("/model.py", []),
        ("*.py\n!model.py", ["train.py"]),
        ("data/a.tx?", ["data/a.txt"]),
        ("*_*_*.py", []),
    ],
)
def test_patterns_mean_what_they_do_in_git(source: Path, pattern: str, ignored: list[str]) -> None:
    names = ["data/a.txt", "lib/deep/model.py", "train.py"]
    write(source / ".gitignore", pattern)
    changes = watch(source)
    for name in names:
        write(source / name, "22")
    assert changes.find() == [name for name in names if name not in ignored]


def test_files_of_variables_and_secrets_are_watched(source: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    variables = tmp_path_factory.mktemp("outside") / "variables"
    variables.write_text("A=1")
    changes = Changes(Selection(source, "train.py"), (variables,))
    variables.write_text("A=22")
    assert changes.find() == [str(variables)]


def test_a_link_to_a_file_of_variables_is_followed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = tmp_path_factory.mktemp("outside")
    (outside / "target").write_text("A=1")
    (outside / "link").symlink_to("target")
    changes = Changes(Selection(source, "train.py"), (outside / "link",))
    (outside / "target").write_text("A=22")
    assert changes._may_have_changed()
    assert changes.find() == [str(outside / "link")]


def test_a_large_source_is_looked_at_each_second(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, pauses = watch(source), list[float]()
    times = iter(range(0, 1000, 10))  # a look takes 10 s

    def pause(seconds: float) -> bool:
        pauses.append(seconds)
        if len(pauses) == 2:
            write(source / "train.py", "22")
        return False

    monkeypatch.setattr("shoal.jobs.changes.time", SimpleNamespace(monotonic=lambda: next(times)))
    ended = SimpleNamespace(wait=pause, is_set=lambda: False)
    assert changes.wait(cast(threading.Event, ended)) == ["train.py"]
    assert pauses == [0, 1, 1], "before the first look, between looks, and until nothing changes any more"


def test_a_wait_until_nothing_changes_ends_with_its_run(source: Path) -> None:
    changes, ended, looks = watch(source), threading.Event(), itertools.count(2)

    def pause(_: float) -> bool:
        write(source / "train.py", "2" * next(looks))  # as a job that writes beside its code
        if next(looks) > 20:
            ended.set()
        return ended.is_set()

    waiting = SimpleNamespace(wait=pause, is_set=ended.is_set)
    assert changes.wait(cast(threading.Event, waiting)) == []


def test_a_wait_for_changes_ends_with_its_run(source: Path) -> None:
    changes, ended = watch(source), threading.Event()
    threading.Timer(0.2, ended.set).start()
    assert changes.wait(ended) == []


def test_a_source_that_cannot_be_read_for_a_moment_is_a_change_and_no_error(source: Path) -> None:
    changes = watch(source)
    (source / "link").symlink_to("/etc/passwd")  # a run would refuse it
    assert changes.find() == ["."]
    (source / "link").unlink()
    assert changes.find() == ["."]


def test_directories_that_a_job_can_write_are_not_watched(source: Path) -> None:
    for name in ("cache", "only_read"):
        (source / name).mkdir()
    volumes = tuple(Volume(source / name, f"/{name}", name == "only_read") for name in ("cache", "only_read"))
    whole = Volume(source, "/work")
    request = JobRequest(image="pytorch", source=source, entry_point="train.py", volumes=(*volumes, whole))
    changes = Changes(_leave_out_written(request))
    write(source / "cache/x", "")
    assert changes.find() == []
    write(source / "only_read/x", "")
    assert changes.find() == ["only_read/x (new)"]


def test_waiting_ends_with_the_next_change(source: Path) -> None:
    changes, found = watch(source), list[str]()
    thread = threading.Thread(target=lambda: found.extend(changes.wait()), daemon=True)
    thread.start()
    command = f"import pathlib; pathlib.Path({str(source / 'train.py')!r}).write_text('by another program')"
    subprocess.run((sys.executable, "-c", command), check=True)
    thread.join(SECONDS)
    assert found == ["train.py"]
