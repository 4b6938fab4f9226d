"""The checkpoints of a job: a directory that one job and one command owns, and that is replaced as a whole."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import UsageError
from shoal.jobs import checkpoints, store
from shoal.jobs.checkpoints import CONTENT, MARK, LockedCheckpoints, open_directory
from shoal.jobs.job import DOCKER, LOCAL, SECRET, JobRequest
from shoal.jobs.store import JobRecord, open_job, read_record
from shoal.jobs.volumes import Volume


def replace(opened: LockedCheckpoints, **files: str) -> None:
    with opened.replace() as scratch:
        (scratch / CONTENT).mkdir()
        for name, text in files.items():
            (scratch / CONTENT / name).write_text(text)


def content(path: Path) -> dict[str, str]:
    return {each.name: each.read_text() for each in path.iterdir() if each.name != MARK}


@pytest.mark.parametrize("can_exchange", [True, False])
def test_directory_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool) -> None:
    """Also on a file system that can't exchange two directories in one step, such as NFS."""
    if not can_exchange:
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())
    path = tmp_path / "new" / "ck"
    with open_directory(path, "a", "--checkpoints") as opened:
        assert not opened.has_files()
        replace(opened, first="1", both="1")
        assert opened.has_files()
        replace(opened, both="2")
    assert content(path) == {"both": "2"}
    assert [each.name for each in path.parent.iterdir()] == ["ck"]
    assert json.loads((path / MARK).read_text()) == {"job": "a"}


def test_failed_replacement_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "ck"
    with open_directory(path, "a", "--checkpoints") as opened:
        replace(opened, old="1")
        with pytest.raises(KeyboardInterrupt), opened.replace() as scratch:
            (scratch / CONTENT).mkdir()
            (scratch / CONTENT / "half").write_text("")
            raise KeyboardInterrupt
        with pytest.raises(FileNotFoundError), opened.replace():
            pass
    assert content(path) == {"old": "1"}
    assert [each.name for each in tmp_path.iterdir()] == ["ck"]


KILLED = """\
import os, pathlib, signal, sys
from shoal.jobs import checkpoints
moment = sys.argv[2]
def die(*_): os.kill(os.getpid(), signal.SIGKILL)
if moment == "before":
    checkpoints._exchange = die
elif moment == "between":
    checkpoints.ctypes.CDLL = lambda *_, **__: object()
    rename = pathlib.Path.rename
    pathlib.Path.rename = lambda self, target: die() if self.name == "checkpoints" else rename(self, target)
else:
    checkpoints.shutil.rmtree = lambda path, **_: die() if (pathlib.Path(path) / "checkpoints").exists() else None
with checkpoints.open_directory(pathlib.Path(sys.argv[1]), "a", "--checkpoints") as opened, opened.replace() as scratch:
    (scratch / "checkpoints").mkdir()
    (scratch / "checkpoints" / "new").write_text("2")
"""


@pytest.mark.parametrize(
    ("moment", "found"), [("before", {"old": "1"}), ("between", {"old": "1"}), ("after", {"new": "2"})]
)
def test_killed_command_leaves_the_old_or_the_new_content_and_no_lock(
    tmp_path: Path, moment: str, found: dict[str, str]
) -> None:
    path = tmp_path / "ck"
    with open_directory(path, "a", "--checkpoints") as opened:
        replace(opened, old="1")
    command: list[str | Path] = [sys.executable, "-c", KILLED, path, moment]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert path.exists() or moment == "between"
    with open_directory(path, "a", "--checkpoints"):
        assert content(path) == found
    assert [each.name for each in tmp_path.iterdir()] == ["ck"]


def test_only_one_command_uses_a_directory(tmp_path: Path) -> None:
    path = tmp_path / "ck"
    (tmp_path / ".ck.shoal-lock").write_text("of a killed command " * 20)
    with open_directory(path, "a", "--checkpoints"):
        with pytest.raises(UsageError, match=rf"is used by a \(process {os.getpid()} on {socket.gethostname()}\)"):
            open_directory(path, "b", "--checkpoints ck").__enter__()
        with pytest.raises(UsageError, match="--resume a: the job still runs"):
            open_directory(path, "a", "--resume a").__enter__()
    with open_directory(path, "b", "--checkpoints"):  # it is empty, so that nobody loses anything
        pass


def test_lock_lasts_as_long_as_a_process_that_has_inherited_it(tmp_path: Path) -> None:
    path = tmp_path / "ck"
    locking = (
        "import os, subprocess, sys, pathlib\n"
        "from shoal.jobs.checkpoints import open_directory\n"
        "with open_directory(pathlib.Path(sys.argv[1]), 'a', '') as opened:\n"
        "    quiet = {'stdout': subprocess.DEVNULL, 'stderr': subprocess.DEVNULL}\n"
        "    print(subprocess.Popen(['sleep', '60'], pass_fds=[opened.lock], **quiet).pid, flush=True)\n"
        "    os._exit(0)\n"
    )
    pid = int(subprocess.run([sys.executable, "-c", locking, path], check=True, capture_output=True).stdout)
    try:
        with pytest.raises(UsageError, match="still runs"):
            open_directory(path, "a", "--resume a").__enter__()
    finally:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("mark", ['{"job": "a"}', "", "[]", '{"name": "a"}'])
def test_checkpoints_of_another_job_are_refused_and_unchanged(tmp_path: Path, mark: str) -> None:
    (tmp_path / MARK).write_text(mark)
    (tmp_path / "model").write_text("1")
    with pytest.raises(UsageError) as caught:
        open_directory(tmp_path, "b", "--checkpoints ck").__enter__()
    expected = (
        "the job a, and nothing was changed. Fix: to continue that job, use --resume a,"
        if "job" in mark
        else "its owner"
    )
    assert expected in str(caught.value)
    assert content(tmp_path) == {"model": "1"}
    assert (tmp_path / MARK).read_text() == mark


def test_files_without_a_mark_become_the_jobs(tmp_path: Path) -> None:
    """Such as those that were downloaded from S3."""
    (tmp_path / "model").write_text("1")
    with open_directory(tmp_path, "b", "--checkpoints"):
        pass
    with pytest.raises(UsageError, match="the checkpoints of the job b"):
        open_directory(tmp_path, "c", "--checkpoints").__enter__()


@pytest.mark.parametrize("place", ["ck/inner", "."])
def test_directory_above_or_below_another_jobs_is_refused(tmp_path: Path, place: str) -> None:
    with open_directory(tmp_path / "ck", "a", "--checkpoints"):
        pass
    with pytest.raises(UsageError, match=r"ck has the checkpoints of a job"):
        open_directory(tmp_path / place, "b", "--checkpoints").__enter__()


def test_directories_that_must_not_be_replaced_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    for path, words in (
        (tmp_path, "contains this directory or your home"),
        (Path.home(), "contains this directory or your home"),
        (Path("/proc"), "is a mount point"),
        (tmp_path / "file", "not a directory"),
    ):
        with pytest.raises(UsageError, match=words):
            open_directory(path, "a", "--checkpoints").__enter__()


def test_tree_is_copied_with_links_and_without_sockets(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "step-1").mkdir(parents=True)
    (source / "step-1" / "model").write_text("1")
    (source / "last").symlink_to("step-1")
    (source / "by-name").symlink_to(source / "step-1")
    (source / "step-1" / "by-name").symlink_to(source / "last")
    os.mkfifo(source / "pipe")
    target.mkdir()
    checkpoints.copy_tree(source, target, link=True)
    assert sorted(path.name for path in target.iterdir()) == ["by-name", "last", "step-1"]
    links = {"last": "step-1", "by-name": "step-1", "step-1/by-name": "../last"}
    assert {name: str((target / name).readlink()) for name in links} == links
    assert (target / "step-1" / "model").samefile(source / "step-1" / "model")


@pytest.fixture
def request_(tmp_path: Path) -> JobRequest:
    source = tmp_path / "code"
    source.mkdir()
    (source / "train.py").touch()
    return JobRequest(source=source, entry_point="train.py", output=tmp_path / "jobs")


def run(request: JobRequest, code: int | None = 7, engine: str = DOCKER, **files: str) -> str:
    """Run a job that writes files and ends; return its name."""
    with open_job(JobRecord(dataclasses.replace(request, image="image:1", engine=engine)), None) as opened:
        if files:
            replace(opened.checkpoints, **files)
        (opened.directory / "model.tar.gz").touch()
        opened.update(exit_code=code)
    return opened.name


def resume(name: str, output: Path, **changes: Any) -> store.OpenJob:
    found = read_record(output, name)
    request = dataclasses.replace(found.request, **changes)
    with open_job(dataclasses.replace(found, request=request), name) as opened:
        return opened


def test_resumed_job_keeps_its_name_and_checkpoints(request_: JobRequest) -> None:
    name = run(request_, None, model="1")
    opened = resume(name, request_.output)
    assert (opened.name, opened.record.exit_code, content(opened.checkpoints.path)) == (name, None, {"model": "1"})
    assert sorted(path.name for path in opened.directory.iterdir()) == ["attempt-1", CONTENT, store.RECORD]
    assert (opened.directory / "attempt-1" / "model.tar.gz").exists()


def test_record_has_all_but_the_jobs_secret(request_: JobRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(request_.output.parent)
    request = JobRequest(
        source=Path("code"),
        entry_point="train.py",
        arguments=("--epochs", "3", ""),
        image="image:1",
        hosts=2,
        procs_per_host=2,
        channels={"training": Path("code")},
        hyperparameters={"epochs": "3"},
        distribution={"mpi": {"enabled": True}},
        environment={SECRET: "0123456789abcdef", "A": "b"},
        output=request_.output,
        memory="1g",
        cpus=0.5,
        volumes=(Volume(Path("code"), "/data", read_only=True),),
        checkpoints=Path("ck"),
        max_restarts=3,
    )
    name = run(request)
    path = request.output / name / store.RECORD
    assert path.stat().st_mode & 0o777 == 0o600
    source = request_.output.parent.resolve() / "code"
    assert read_record(request.output, name).request == JobRequest(
        **{
            **vars(request),
            "source": source,
            "channels": {"training": source},
            "volumes": (Volume(source, "/data", read_only=True),),
            "environment": {"A": "b"},
            "checkpoints": source.parent / "ck",
        }
    )


@pytest.mark.parametrize(
    ("code", "files", "words"),
    [(0, {"model": "1"}, "the job has succeeded"), (7, {}, "the job has no checkpoints in .*Fix: start it again")],
)
def test_job_that_cannot_be_resumed(request_: JobRequest, code: int, files: dict[str, str], words: str) -> None:
    name = run(request_, code, **files)
    with pytest.raises(UsageError, match=words):
        resume(name, request_.output)
    assert content(request_.output / name / CONTENT) == files
    assert (request_.output / name / "model.tar.gz").exists(), "nothing was moved"


def test_running_job_is_not_resumed(request_: JobRequest) -> None:
    with (
        open_job(JobRecord(dataclasses.replace(request_, image="image:1")), None) as opened,
        pytest.raises(UsageError, match=f"--resume {opened.name}: the job still runs"),
    ):
        resume(opened.name, request_.output)


def test_unknown_job_is_an_error(request_: JobRequest) -> None:
    name = run(request_, 7, model="1")
    with pytest.raises(UsageError, match=f"no such job in .* Did you mean '{name}'"):
        read_record(request_.output, f"{name}0")
    (request_.output / "other").mkdir()
    with pytest.raises(UsageError, match=r"has no request\.json"):
        read_record(request_.output, "other")
    earlier = '{"image": "x", "engine": "none", "request": {"hosts": 1}}'
    for text in ("", "{}", '{"request": {"hosts": "many"}}', earlier):
        (request_.output / "other" / store.RECORD).write_text(text)
        with pytest.raises(UsageError, match=r"--resume other: .*request\.json was not written by this version"):
            read_record(request_.output, "other")


def test_refused_job_leaves_no_directory(request_: JobRequest, tmp_path: Path) -> None:
    request = JobRequest(**{**vars(request_), "checkpoints": tmp_path / "ck"})
    name = run(request, model="1")
    with pytest.raises(UsageError, match=f"has the checkpoints of the job {name}"):
        run(request, model="2")
    assert content(tmp_path / "ck") == {"model": "1"}
    assert [path.name for path in request.output.iterdir()] == [name]


def test_checkpoints_of_a_killed_command_are_found(request_: JobRequest) -> None:
    """Without Docker they are in the tree; in Docker, in its volume, which a job without Docker cannot read."""
    name = run(request_, None, LOCAL, model="1")
    directory = request_.output / name
    tree = directory / "algo-1" / CONTENT
    tree.mkdir(parents=True)
    (tree / "model").write_text("2")
    path = directory / store.RECORD
    killed = json.loads(path.read_text()) | {"uncollected": True}
    path.write_text(json.dumps(killed))
    opened = resume(name, request_.output)
    assert (content(opened.checkpoints.path), opened.record.uncollected) == ({"model": "2"}, False)
    path.write_text(json.dumps(killed | {"request": {**killed["request"], "engine": DOCKER}}))
    with pytest.raises(UsageError, match="the newest checkpoints are in a Docker volume"):
        resume(name, request_.output, engine=LOCAL)
    assert resume(name, request_.output).record.uncollected


def test_checkpoints_must_not_contain_other_files_of_the_job(request_: JobRequest, tmp_path: Path) -> None:
    for change, words in (
        ({"checkpoints": request_.source}, "--checkpoints .*code: contains --source"),
        ({"checkpoints": tmp_path}, "contains --source"),
        ({"checkpoints": tmp_path / "jobs"}, "contains --output"),
        ({"checkpoints": tmp_path / "ck", "channels": {"a": tmp_path / "ck"}}, "contains --channel a"),
        ({"environment": {"SHOAL_MAX_RESTARTS": "3"}}, "Fix: --max-restarts N"),
    ):
        (tmp_path / "ck").mkdir(exist_ok=True)
        with pytest.raises(UsageError, match=words):
            JobRequest(**{**vars(request_), **change}).check()
