"""Jobs that somebody else wrote, or links and processes that lead out of a job: nothing of this user is touched."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from rich.console import Console

from shoal import trust
from shoal.errors import UsageError, convert_os_error
from shoal.jobs import checkpoints, job_log, processes, running, store
from shoal.jobs.checkpoints import CONTENT, MARK, open_directory
from shoal.jobs.job import DOCKER, LOCAL, RESOURCE_CONFIG, JobRequest
from shoal.jobs.stopping import stop_job
from shoal.jobs.store import RECORD, JobRecord, open_job, read_record

from .command import shoal_command

STRANGER = 65534
CANNOT_OPEN = 66
"""The exit code of flock for a file that it cannot open; 1 for one that is locked."""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user; CI runs as root")


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without jobs, who trusts nothing by name."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    monkeypatch.delenv("SUDO_UID", raising=False)
    return tmp_path / "state"


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """A directory of this user that has nothing to do with any job."""
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "key").write_text("secret")
    return tmp_path / "private"


@pytest.fixture
def request_(tmp_path: Path) -> JobRequest:
    source = tmp_path / "code"
    source.mkdir()
    (source / "train.py").touch()
    return JobRequest(source=source, entry_point="train.py", output=tmp_path / "jobs")


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process of this user that has nothing to do with any job."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def run(request: JobRequest, code: int | None = None, engine: str = LOCAL, **changes: Any) -> Path:
    """Run a job that ends with a code, or with a killed command; return its directory."""
    with open_job(JobRecord(dataclasses.replace(request, image="image:1", engine=engine)), None, "digits") as opened:
        (opened.checkpoints.path / "step-1").write_text("1")
        opened.update(exit_code=code, **changes)
    return opened.directory


def write_foreign_job(project: Path, **request: Any) -> Path:
    """Write a job to jobs/digits of a project, as a stranger would: it asks for all that a record can ask for."""
    directory = project / "jobs" / "digits"
    tree = directory / "algo-1"
    (tree / "input" / "config").mkdir(parents=True)
    (tree / RESOURCE_CONFIG).touch()
    (tree / CONTENT).mkdir()
    (tree / CONTENT / "key").write_text("of the stranger")
    document = {"source": str(project), "entry_point": "train.py", "output": str(project / "jobs")}
    document |= {"image": "image:1", "engine": LOCAL, **request}
    found = {"uncollected": True, "request": document, "identity": "digits-1"}
    (directory / RECORD).write_text(json.dumps(found))
    (project / "train.py").write_text(f"open({str(project / 'RAN')!r}, 'w')")
    return directory


def give_away(path: Path) -> None:
    for each in (path, *path.rglob("*")):
        os.chown(each, STRANGER, STRANGER, follow_symlinks=False)


def shoal(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*shoal_command(), *words], cwd=directory, capture_output=True, text=True, check=False, timeout=60
    )


def console() -> Console:
    return Console(file=io.StringIO())


def content(path: Path) -> dict[str, str]:
    return {each.name: each.read_text() for each in path.iterdir() if each.name != MARK}


@pytest.mark.parametrize("is_cloned", [True, pytest.param(False, marks=needs_root)])
@pytest.mark.parametrize(
    "words", [("stop", "digits"), ("run", "--resume", "digits"), ("exec", "digits", "--", "touch", "RAN")]
)
def test_the_record_of_a_stranger_is_not_obeyed(
    tmp_path: Path, private: Path, words: tuple[str, ...], is_cloned: bool
) -> None:
    """In a project that another user wrote, or that this user has cloned, so that its files are this user's."""
    project = tmp_path / "project"
    directory = write_foreign_job(project, checkpoints=str(private))
    if not is_cloned:
        give_away(project)
    result = shoal(project, *words)
    if words[0] == "stop" and not is_cloned:  # root stops it as that user, who cannot even enter this directory
        assert (result.returncode, f"{directory / RECORD}: Permission denied" in result.stderr) == (13, True)
    else:
        check_refusal(result, directory, is_cloned)
    assert content(private) == {"key": "secret"}
    assert not (private / MARK).exists()
    assert not (project / "RAN").exists()
    assert shoal(project, "ps", "--all").stdout.count("\n") == 1, "only the heading"


def check_refusal(result: subprocess.CompletedProcess[str], directory: Path, is_cloned: bool) -> None:
    assert result.returncode == 2, result.stdout + result.stderr
    reason = "your list of jobs .* does not have it" if is_cloned else "belongs to the user"
    assert f"{directory} is not a job of yours" in result.stderr
    assert reason.split(" .* ")[0] in result.stderr
    assert (
        f"Fix: if it is yours, such as one that you have moved or copied here: shoal trust {directory}" in result.stderr
    )


def test_a_job_that_was_copied_here_is_continued_after_its_directory_is_trusted(
    request_: JobRequest, tmp_path: Path
) -> None:
    directory = run(request_, 7)
    moved = tmp_path / "elsewhere" / "digits"
    shutil.copytree(directory, moved)
    with pytest.raises(UsageError, match=f"--resume digits: .* shoal trust {moved}"):
        read_record(moved.parent, "digits")
    assert shoal(tmp_path, "trust", str(moved)).returncode == 0
    found = read_record(moved.parent, "digits")
    with open_job(
        dataclasses.replace(found, request=dataclasses.replace(found.request, output=moved.parent)), "digits"
    ):
        assert store.find_running_job(str(moved)).directory == moved


def test_trust_in_a_project_is_not_trust_in_its_jobs(tmp_path: Path, private: Path) -> None:
    project = tmp_path / "project"
    write_foreign_job(project, checkpoints=str(private))
    assert shoal(project, "trust", ".").returncode == 0
    assert shoal(project, "stop", "digits").returncode == 2
    assert content(private) == {"key": "secret"}


def test_another_job_in_the_place_of_the_own_job_is_refused(request_: JobRequest, private: Path) -> None:
    """This user had a job there, has removed it, and cloned a project with one of that name."""
    directory = run(request_)
    shutil.rmtree(directory)
    write_foreign_job(directory.parents[1], checkpoints=str(private))
    with pytest.raises(UsageError, match="your list of jobs"):
        stop_job(store.read_job(directory), console())
    assert store.list_jobs() == []


def test_a_job_with_the_name_and_label_of_a_removed_one_is_refused(request_: JobRequest, private: Path) -> None:
    """Both are in reports and logs, which the stranger may have seen. A job without `--name` has one text for both."""
    with open_job(JobRecord(dataclasses.replace(request_, image="image:1", engine=LOCAL)), None) as opened:
        (opened.checkpoints.path / "step-1").write_text("1")
    directory = opened.directory
    shutil.rmtree(directory)
    found = write_foreign_job(directory.parents[1], checkpoints=str(private))
    forged = json.loads((found / RECORD).read_text()) | {"identity": opened.identity}
    (found / RECORD).write_text(json.dumps(forged))
    found.rename(directory)
    with pytest.raises(UsageError, match="your list of jobs"):
        read_record(directory.parent, directory.name)
    assert store.list_jobs() == []


@needs_root
@pytest.mark.parametrize("place", ["code", "variables.env"])
def test_a_resumed_job_runs_nothing_that_another_user_has_put_in_its_place(tmp_path: Path, place: str) -> None:
    """Such as in /tmp, from where an old file was removed."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text(
        "import os, sys; open(os.environ['SAGEMAKER_BASE_DIR'] + '/checkpoints/step', 'w'); sys.exit(3)"
    )
    (tmp_path / "variables.env").write_text("A=1\n")
    options = ("--engine", "none", "--name", "digits", "--env-file", "variables.env")
    assert shoal(tmp_path, "run", *options, "image:1", "code/train.py").returncode == 3
    os.chown(tmp_path / place, STRANGER, STRANGER)
    resumed = shoal(tmp_path, "run", "--resume", "digits")
    assert resumed.returncode == 2
    assert f"{tmp_path / place} belongs to the user {STRANGER} now, and to 0 when the job started" in resumed.stderr
    os.chown(tmp_path / place, 0, 0)
    assert shoal(tmp_path, "run", "--resume", "digits").returncode == 3


@needs_root
def test_a_list_of_jobs_that_others_can_write_to_is_not_believed(
    tmp_path: Path, state: Path, private: Path, request_: JobRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = write_foreign_job(tmp_path / "project", checkpoints=str(private))
    running._remember(directory, "digits-1")
    running.check_own(directory, "digits-1", "digits")
    (state / "shoal").chmod(0o777)
    with pytest.raises(UsageError, match="your list of jobs"):
        running.check_own(directory, "digits-1", "digits")
    with open_job(JobRecord(dataclasses.replace(request_, image="image:1")), None):
        pass
    assert "so `shoal ps` and `shoal stop` refuse this job. Fix: " in capsys.readouterr().err


@needs_root
@pytest.mark.parametrize("name", ["", RECORD, "algo-1"])
def test_a_job_with_files_of_another_user_is_refused(request_: JobRequest, name: str) -> None:
    directory = run(request_, 7)
    (directory / "algo-1").mkdir()
    os.chown(directory / name, STRANGER, STRANGER)
    with pytest.raises(UsageError, match="belongs to the user"):
        stop_job(store.read_job(directory), console())


@pytest.mark.parametrize("is_same_number", [True, False])
def test_only_the_process_that_started_the_job_is_signalled(
    request_: JobRequest, sleeper: subprocess.Popen[bytes], is_same_number: bool
) -> None:
    """The number of a command that has ended is used again, or the record names any number."""
    directory = run(request_)
    start = processes.describe_start(sleeper.pid)
    found = dataclasses.replace(store.read_job(directory).record, pid=sleeper.pid, process_start=start)
    assert processes.is_alive(found.pid, found.process_start)
    boot, _, ticks = start.partition(" ")
    others = [f"{boot} {int(ticks) - 1}", f"another-boot {ticks}", ""] if is_same_number else [start]
    number = sleeper.pid if is_same_number else os.getppid()
    for other in others:
        assert not processes.send_signal(number, other, signal.SIGTERM)
        stale = store.KnownJob(
            directory.name, directory, dataclasses.replace(found, pid=number, process_start=other), "running"
        )
        with running.mark_running(directory, stale.identity), pytest.raises(UsageError, match="not visible here"):
            stop_job(stale, console())
    assert sleeper.poll() is None
    assert processes.send_signal(sleeper.pid, start, signal.SIGTERM)
    assert sleeper.wait(10) == -signal.SIGTERM


@needs_root
def test_processes_of_other_users_do_not_belong_to_a_job(tmp_path: Path) -> None:
    """They can have any environment, and `shoal exec` takes the one of the job's process over."""
    tree = tmp_path / "algo-1"
    environment = {"SAGEMAKER_BASE_DIR": str(tree), "LD_PRELOAD": "/nonexistent.so"}
    command = ["/bin/sleep", "60"]
    with (
        subprocess.Popen(command, env=environment, user=STRANGER, stderr=subprocess.DEVNULL) as foreign,
        subprocess.Popen(command, env={"SAGEMAKER_BASE_DIR": str(tree)}) as own,
    ):
        try:
            until = time.monotonic() + 10
            while own.pid not in processes.list_processes(tree) and time.monotonic() < until:
                time.sleep(0.01)
            assert processes.list_processes(tree) == [own.pid]
            assert processes.list_descendants(tree, os.getpid()) == [own.pid]
            assert processes.list_descendants(tree, foreign.pid) == [], "not started by that command"
            start = processes.describe_start(foreign.pid)
            assert not processes.send_signal(foreign.pid, start, signal.SIGKILL)
        finally:
            foreign.kill()
            own.kill()


@needs_root
def test_processes_of_containers_do_not_belong_to_a_job(tmp_path: Path) -> None:
    """Root in one has the number of this machine's root. Such processes kept `shoal stop` of a lost job waiting."""
    tree = tmp_path / "algo-1"
    command = ["unshare", "--pid", "--fork", "--kill-child", "/bin/sleep", "60"]
    with subprocess.Popen(command, env={"PATH": os.environ["PATH"], "SAGEMAKER_BASE_DIR": str(tree)}) as own:
        try:
            children = Path(f"/proc/{own.pid}/task/{own.pid}/children")
            until = time.monotonic() + 10
            while not children.read_text() and time.monotonic() < until:
                time.sleep(0.01)
            assert children.read_text()
            assert processes.list_processes(tree) == [own.pid]
        finally:
            own.kill()


@needs_root
def test_other_users_cannot_lock_a_job(request_: JobRequest) -> None:
    """A reader could: then `shoal stop` would wait for it without an end."""
    with TemporaryDirectory() as shared:
        Path(shared).chmod(0o755)
        request = dataclasses.replace(request_, output=Path(shared), checkpoints=Path(shared, "ck"))
        left = Path(shared, ".ck.shoal-lock")
        left.touch(0o644)  # as an earlier version left it
        assert take_lock(left) == 0
        with open_job(JobRecord(dataclasses.replace(request, image="image:1")), None, "digits"):
            assert take_lock(left) == CANNOT_OPEN
            assert take_lock(Path(shared, "digits", running.MARK)) == CANNOT_OPEN


def take_lock(path: Path) -> int:
    """Let another user lock a file, and return the exit code of that."""
    return subprocess.run(["flock", "-s", "-n", path, "true"], user=STRANGER, check=False).returncode


def test_a_lock_without_a_command_does_not_keep_stop_waiting(
    request_: JobRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "_GRACE", 0.2)
    directory = run(request_)
    with (directory / running.MARK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="its command has ended, but another process has locked"):
            running.wait_for_end(directory, lambda: False)


@pytest.mark.parametrize("name", [running.MARK, f"{RECORD}.new", f".{CONTENT}.shoal-lock", f"{CONTENT}/{MARK}.new"])
@pytest.mark.parametrize("make", [os.symlink, os.link])
def test_links_in_a_job_are_not_written_through(request_: JobRequest, private: Path, name: str, make: Any) -> None:
    directory = run(request_, 7)
    make(private / "key", directory / name)
    with contextlib.suppress(OSError):
        stop_job(store.read_job(directory), console())
        with open_job(read_record(request_.output, "digits"), "digits"):
            pass
    assert content(private) == {"key": "secret"}


@pytest.mark.parametrize("engine", [LOCAL, DOCKER])
def test_a_link_in_the_place_of_a_host_s_tree_is_not_followed(request_: JobRequest, private: Path, engine: str) -> None:
    """`jobs/digits/algo-1` leads to a directory of this user that looks like a tree."""
    directory = run(request_, 7 if engine == DOCKER else None, engine)
    (private / RESOURCE_CONFIG).parent.mkdir(parents=True)
    (private / RESOURCE_CONFIG).touch()
    for name in (CONTENT, "code"):
        (private / name).mkdir()
        (private / name / "kept").touch()
    (directory / "algo-1").symlink_to(private)
    assert store.list_host_trees(directory) == store.find_trees(directory) == []
    stop_job(store.read_job(directory), console())
    with open_job(read_record(request_.output, "digits"), "digits"):
        pass
    assert (private / CONTENT / "kept").exists()
    assert (private / "code" / "kept").exists()


def test_a_checkpoint_with_the_name_of_the_directory_is_no_tree(request_: JobRequest) -> None:
    directory = run(request_, 7)
    (directory / CONTENT / CONTENT).mkdir()
    (directory / CONTENT / CONTENT / "step-2").touch()
    with open_job(read_record(request_.output, "digits"), "digits"):
        pass
    assert (directory / CONTENT / CONTENT / "step-2").exists()


def test_a_link_in_the_place_of_a_jobs_checkpoints_is_refused(request_: JobRequest, private: Path) -> None:
    directory = run(request_)
    shutil.rmtree(directory / CONTENT)
    (directory / CONTENT).symlink_to(private)
    for act in (
        lambda: stop_job(store.read_job(directory), console()),
        lambda: open_job(read_record(request_.output, "digits"), "digits").__enter__(),
    ):
        with pytest.raises(UsageError, match="is a link, and the job replaces its checkpoints"):
            act()
    assert [each.name for each in private.iterdir()] == ["key"]


def replace(opened: checkpoints.LockedCheckpoints, name: str) -> None:
    with opened.replace() as scratch:
        (scratch / CONTENT).mkdir()
        (scratch / CONTENT / name).write_text(name)


@pytest.mark.parametrize("is_resumed", [False, True])
def test_files_that_were_there_before_the_job_are_kept(
    private: Path, capsys: pytest.CaptureFixture[str], is_resumed: bool
) -> None:
    os.mkfifo(private / "pipe")
    for _ in range(1 + is_resumed):
        opening = open_directory(private, "digits-1", "--checkpoints")
        opened = opening.__enter__()
        if is_resumed:  # the first command was killed before it replaced anything
            opening.__exit__(None, None, None)
            opening = open_directory(private, "digits-1", "--checkpoints")
            opened = opening.__enter__()
        replace(opened, "step-1")
        replace(opened, "step-2")
        opening.__exit__(None, None, None)
    kept = private.with_name("private.before-digits-1")
    assert sorted(each.name for each in kept.iterdir()) == ["key", "pipe"]
    assert (kept / "key").read_text() == "secret"
    assert content(private) == {"step-2": "step-2"}
    assert capsys.readouterr().err == f"shoal: the files that were in {private} before the job are in {kept}\n"


def test_a_lost_job_takes_no_directory_without_its_mark(request_: JobRequest, private: Path) -> None:
    own = dataclasses.replace(request_, checkpoints=private.parent / "ck")
    directory = run(own, uncollected=True)
    shutil.rmtree(private.parent / "ck")
    private.rename(private.parent / "ck")
    with pytest.raises(UsageError, match=f"has files, but no {MARK} that names the job"):
        stop_job(store.read_job(directory), console())
    assert content(private.parent / "ck") == {"key": "secret"}


def test_a_lost_job_that_replaced_nothing_keeps_the_files_that_were_there(request_: JobRequest, private: Path) -> None:
    """Its command was killed after it had marked the directory, before its hosts started."""
    with open_job(
        JobRecord(dataclasses.replace(request_, checkpoints=private, image="image:1", engine=LOCAL)), None, "digits"
    ) as job:
        pass
    assert stop_job(store.read_job(job.directory), console()).state == "stopped"
    assert content(private) == {"key": "secret"}


def test_a_directory_that_became_another_jobs_is_not_replaced(tmp_path: Path) -> None:
    with open_directory(tmp_path / "ck", "digits-1", "--checkpoints") as opened:
        (tmp_path / "ck" / MARK).write_text('{"job": "other"}')
        (tmp_path / "ck" / "key").touch()
        with pytest.raises(UsageError, match="became the directory of the job other"):
            replace(opened, "step-1")
    assert content(tmp_path / "ck") == {"key": ""}


@needs_root
def test_what_others_put_beside_checkpoints_is_not_taken(tmp_path: Path, private: Path) -> None:
    """In a directory that all can write to: content for the job, a lock that is a link, and a mark above it."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    planted = shared / ".ck.shoal-old"
    planted.mkdir()
    for name in (MARK, "step-9.pkl"):
        (planted / name).write_text('{"job": "digits-1"}')
    (shared / MARK).write_text('{"job": "digits-1"}')
    give_away(planted)
    give_away(shared / MARK)
    with open_directory(shared / "ck", "digits-1", "--checkpoints") as opened:
        assert not opened.has_files()
    lock = shared / ".ck.shoal-lock"
    lock.symlink_to(private / "key")
    message = f"special file, or a file of another user. Fix: remove it, or if it is yours: shoal trust {shared}"
    with (
        pytest.raises(PermissionError, match=message) as caught,
        open_directory(shared / "ck", "digits-1", "--checkpoints"),
    ):
        pass
    assert str(convert_os_error(caught.value)).count("Fix: ") == 1
    lock.unlink()
    lock.touch()
    give_away(lock)
    with pytest.raises(PermissionError), open_directory(shared / "ck", "digits-1", "--checkpoints"):
        pass
    assert content(private) == {"key": "secret"}


@needs_root
def test_a_mark_of_another_user_names_nobody(private: Path) -> None:
    (private / MARK).write_text('{"job": "digits-1"}')
    give_away(private / MARK)
    with (
        pytest.raises(UsageError, match="is not your file"),
        open_directory(private, "digits-1", "--checkpoints"),
    ):
        pass
    assert content(private) == {"key": "secret"}


@pytest.mark.parametrize("name", [RECORD, running.MARK])
def test_pipes_of_a_stranger_are_not_waited_for(tmp_path: Path, name: str) -> None:
    directory = write_foreign_job(tmp_path / "project")
    (directory / name).unlink(missing_ok=True)
    os.mkfifo(directory / name)
    assert shoal(tmp_path / "project", "stop", "digits").returncode == 2


def test_a_name_that_is_a_link_is_in_use(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "digits").symlink_to(tmp_path / "missing")
    with pytest.raises(UsageError, match="--name digits: in use"):
        store.check_name("digits", tmp_path / "jobs")


def test_logs_of_another_job_are_read_without_effects(tmp_path: Path) -> None:
    project = tmp_path / "project"
    directory = write_foreign_job(project)
    (directory / job_log.LOG).write_text('[1, "algo-1", "a line"]\n')
    before = sorted(directory.rglob("*"))
    result = shoal(project, "logs", "digits")
    assert result.stdout == "algo-1 | a line\n"
    assert sorted(directory.rglob("*")) == before


AS_ROOT = """\
import pwd, sys
entry, home = pwd.getpwuid(int(sys.argv[2])), sys.argv[1]
pwd.getpwuid = lambda number: pwd.struct_passwd([*entry[:5], home, entry[6]])  # with another home
from shoal import cli
sys.argv = ["shoal", "stop", sys.argv[3]]
cli.main()
"""


@needs_root
@pytest.mark.parametrize("way", ["the user's list", "root's trust"])
def test_root_stops_a_job_of_a_user_and_all_files_stay_the_users(
    way: str, request_: JobRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TemporaryDirectory() as home:
        place = Path(home)
        monkeypatch.setenv("XDG_STATE_HOME", str(place / ".local" / "state"))
        directory = run(dataclasses.replace(request_, output=place / "jobs"), uncollected=True)
        tree = directory / "algo-1"
        (tree / RESOURCE_CONFIG).parent.mkdir(parents=True)
        (tree / RESOURCE_CONFIG).touch()
        (tree / CONTENT).mkdir()
        (tree / CONTENT / "step-2").write_text("2")
        give_away(place)
        monkeypatch.delenv("XDG_STATE_HOME")
        if way == "root's trust":
            shutil.rmtree(place / ".local")
            trust.add_trusted(directory)
        command = [sys.executable, "-c", AS_ROOT, home, str(STRANGER), str(directory)]
        ended = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False, timeout=60)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert "stopped by SIGTERM" in ended.stdout
        assert f"belongs to the user nobody ({STRANGER})" in ended.stdout
        assert content(directory / CONTENT) == {"step-2": "2"}
        assert {each.lstat().st_uid for each in directory.rglob("*")} == {STRANGER}


@needs_root
def test_root_writes_nowhere_for_a_users_job(
    request_: JobRequest, private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record of the user names root's directory for its checkpoints."""
    with TemporaryDirectory() as home:
        monkeypatch.setenv("XDG_STATE_HOME", str(Path(home) / ".local" / "state"))
        request = dataclasses.replace(request_, output=Path(home) / "jobs", checkpoints=private.parent / "taken")
        directory = run(request)
        give_away(Path(home))
        trust.add_trusted(directory)
        command = [sys.executable, "-c", AS_ROOT, home, str(STRANGER), str(directory)]
        ended = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 13, ended.stdout + ended.stderr
    assert content(private.parent / "taken") == {"step-1": "1"}
    assert not list(private.parent.glob(".taken*"))


@needs_root
def test_the_directory_of_another_users_job_is_not_to_be_removed(request_: JobRequest) -> None:
    (request_.output / "digits").mkdir(parents=True)
    os.chown(request_.output / "digits", STRANGER, STRANGER)
    with pytest.raises(UsageError, match=r"another user, in .*\. Fix: choose another name or --output$"):
        store.check_name("digits", request_.output)
