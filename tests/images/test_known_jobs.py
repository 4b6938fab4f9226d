"""Jobs that other commands run: their states, names and logs, and a whole job in the background without Docker."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shoal.errors import UsageError
from shoal.jobs import inside, running
from shoal.jobs.checkpoints import CONTENT
from shoal.jobs.hosts import docker as docker_hosts
from shoal.jobs.job import LOCAL, RESOURCE_CONFIG, JobRequest
from shoal.jobs.job_log import LOG, JobLog, LineFilter, read_lines
from shoal.jobs.stopping import stop_job
from shoal.jobs.store import WAITING, JobRecord, check_name, find_job, find_running_job, list_jobs, open_job
from shoal.jobs.view import PlainView

from .test_docker_job import FakeEngine

SHOAL = Path(sys.executable).with_name("shoal")
SCRIPT = """\
import os, pathlib, sys, time
print("variables", os.environ["SM_CURRENT_HOST"], flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without jobs."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def request_(tmp_path: Path) -> JobRequest:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text(SCRIPT)
    return JobRequest(source=tmp_path / "code", entry_point="train.py", output=tmp_path / "jobs")


def run(request: JobRequest, name: str, code: int | None) -> Path:
    """Run a job that ends with a code; None: its command is killed."""
    with open_job(JobRecord(replace(request, image="image:1")), None, name) as opened:
        (opened.directory / "model.tar.gz").touch()
        if code is not None:
            opened.finish(code)
    return opened.directory


def test_states_of_jobs(request_: JobRequest) -> None:
    for name, code in (("done", 0), ("broken", 7), ("killed", None)):
        run(request_, name, code)
    with open_job(JobRecord(replace(request_, image="image:1")), None, "now"):
        found = {each.name: (each.state, each.describe().exit_code) for each in list_jobs()}
        assert [each.name for each in list_jobs()] == ["now", "killed", "broken", "done"]
        assert find_running_job("now").seconds is not None
    assert found == {
        "now": ("running", None),
        "killed": ("lost", None),
        "broken": ("failed", 7),
        "done": ("completed", 0),
    }
    assert [each.name for each in list_jobs()] == ["killed", "broken", "done"], "a job without hosts has no directory"
    with pytest.raises(UsageError, match=r"killed: .*its state is lost. Fix: shoal stop killed ends its hosts"):
        find_running_job("killed")


def test_a_job_that_waits_for_a_change_is_held_by_its_command(request_: JobRequest) -> None:
    with open_job(JobRecord(replace(request_, image="image:1")), None, "next") as opened:
        opened.update(state=WAITING)
        assert (find_running_job("next").state, find_job("next").is_running) == ("waiting", True)
        opened.begin()
        assert find_job("next").state == "running"
        opened.update(state=WAITING)
        (opened.directory / "log.jsonl").touch()
    assert find_job("next").state == "lost", "its command was killed"


def test_jobs_are_found_by_name_and_by_directory(
    request_: JobRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = run(request_, "digits-1", 0)
    assert find_job("digits-1").directory == find_job(str(directory)).directory == directory
    with pytest.raises(UsageError, match=r"digits-2: no such job of yours on this machine. Did you mean 'digits-1'?"):
        find_job("digits-2")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
    assert list_jobs() == []
    assert find_job(str(directory)).state == "completed"
    monkeypatch.chdir(tmp_path)
    assert find_job("digits-1").directory == directory


@pytest.mark.parametrize("name", ["", "a_b", "-a", "a-", "a/b", "..", "ä", "a" * 64])
def test_names_that_sagemaker_refuses_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expected 1 to 63 letters, digits and hyphens"):
        check_name(name, tmp_path)


def test_names_in_use_are_refused(request_: JobRequest, tmp_path: Path) -> None:
    run(request_, "done", 0)
    run(request_, "killed", None)
    check_name("done", tmp_path / "elsewhere")
    with pytest.raises(UsageError, match=r"--name done: in use, .*/jobs/done exists. Fix: "):
        check_name("done", request_.output)
    with pytest.raises(UsageError, match="--name killed: in use by a job that is lost"):
        check_name("killed", tmp_path / "elsewhere")


def test_jobs_of_one_name_share_nothing_in_docker(request_: JobRequest, tmp_path: Path) -> None:
    """Nor do jobs of two users: their Docker is one, and refuses names that are in use."""
    identities = []
    client: Any = FakeEngine()
    for output in ("one", "other"):
        request = JobRequest(**{**vars(request_), "output": tmp_path / output})
        with (
            open_job(JobRecord(replace(request, image="image:1")), None, "digits") as opened,
            docker_hosts.create_hosts(
                client, opened.record.request, opened.name, PlainView(console()), opened.log, opened.identity
            ) as hosts,
        ):
            identities.append(opened.identity)
            settings = client.made[f"{opened.identity}-algo-1"]
        assert settings["labels"] == {"shoal.job": opened.identity}
        assert [mount["Source"] for mount in settings["mounts"]] == [f"shoal-{opened.identity}"]
        assert hosts.network == f"shoal-{opened.identity}"
        assert settings["environment"]["TRAINING_JOB_NAME"] == "digits"
    assert len(set(identities)) == 2


def console() -> Console:
    return Console(file=io.StringIO())


def test_stopping_a_lost_job_that_never_started_keeps_its_checkpoints(request_: JobRequest) -> None:
    """Its command was killed while it copied the checkpoints to a host's tree, which is half filled."""
    with open_job(JobRecord(replace(request_, image="image:1", engine=LOCAL)), None, "killed") as opened:
        (opened.checkpoints.path / "step-9").write_text("whole")
        tree = opened.directory / "algo-1"
        (tree / CONTENT).mkdir(parents=True)
        (tree / RESOURCE_CONFIG).parent.mkdir(parents=True)
        (tree / RESOURCE_CONFIG).touch()
    stopped = stop_job(find_job("killed"), console())
    assert (stopped.state, stopped.record.exit_code) == ("stopped", 143)
    assert (opened.checkpoints.path / "step-9").read_text() == "whole"


def test_a_running_job_comes_before_an_ended_one_of_its_name(
    request_: JobRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(request_, "digits", 0)
    monkeypatch.chdir(tmp_path)
    assert find_job("digits").state == "completed"
    elsewhere = JobRequest(**{**vars(request_), "output": tmp_path / "other"})
    with open_job(JobRecord(replace(elsewhere, image="image:1")), None, "digits"):
        assert find_job("digits").directory == tmp_path / "other" / "digits"
        assert find_job("jobs/digits").state == "completed"


def test_lines_of_a_log_are_chosen(tmp_path: Path) -> None:
    log = JobLog(path=tmp_path / LOG)
    log.add("algo-1", "a", rank=0, shown="[0,algo-1] a")
    log.add("algo-1", "b", "algo-2", 2, "[2,algo-2] b")
    log.add("algo-2", "c")
    log.add("algo-1", "[2,algo-2] d")
    log.close()
    log.add("algo-1", "too late")
    with (tmp_path / LOG).open("a") as file:
        file.write('[1, "algo-1", "half a li')
    assert (tmp_path / LOG).stat().st_mode & 0o777 == 0o600

    def chosen(*filters: Any, **options: Any) -> list[str]:
        return list(read_lines(tmp_path, LineFilter(*filters), **options))

    assert chosen() == ["algo-1 | [0,algo-1] a", "algo-1 | [2,algo-2] b", "algo-2 | c", "algo-1 | [2,algo-2] d"]
    assert chosen("algo-2") == ["algo-1 | [2,algo-2] b", "algo-2 | c"]
    assert chosen(None, 2) == ["algo-1 | [2,algo-2] b"]
    assert chosen(tail=1) == ["algo-1 | [2,algo-2] d"]
    assert chosen(follow=True, tail=0) == [], "the job does not run"
    (line,) = chosen("algo-1", 0, timestamps=True)
    assert line[4] == line[7] == "-"
    assert line.endswith(" algo-1 | [0,algo-1] a")


def test_following_ends_with_the_job(tmp_path: Path) -> None:
    log = JobLog(path=tmp_path / LOG)
    with running.mark_running(tmp_path, "digits"):
        lines = read_lines(tmp_path, LineFilter(), follow=True)
        threading.Timer(0.1, log.add, ("algo-1", "first")).start()
        assert next(lines) == "algo-1 | first"
        log.add("algo-1", "last")
    assert list(lines) == ["algo-1 | last"]
    log.close()


def test_full_disk_ends_the_log_but_not_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    log = JobLog(path=Path("/dev/full"))
    for _ in range(2):
        log.add("algo-1", "text")
    assert len(log.lines) == 2
    assert capsys.readouterr().err.count("/dev/full has no further lines: No space left on device") == 1


def test_frames_are_written_to_their_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    written: dict[int, bytes] = {}

    def write(descriptor: int, data: bytes) -> int:
        written[descriptor] = written.get(descriptor, b"") + data
        return len(data)

    monkeypatch.setattr(os, "write", write)
    frames = inside._Frames()
    for byte in b"\1\0\0\0\0\0\0\3out\2\0\0\0\0\0\0\3err\1\0\0\0\0\0\0\1!":
        frames.add(bytes([byte]))
    assert written == {1: b"out!", 2: b"err"}


def test_job_in_the_background(request_: JobRequest, tmp_path: Path) -> None:
    """It is started, read, entered and stopped by different commands."""

    def shoal(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        result = subprocess.run([SHOAL, *words], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
        assert result.returncode == code, result.stdout + result.stderr
        return result

    words = ("run", "any:1", "code/train.py", "--local", "--detach", "--name", "digits")
    started = json.loads(shoal(*words, "--json").stdout)
    assert (started["name"], started["state"], started["directory"]) == (
        "digits",
        "running",
        str(tmp_path / "jobs/digits"),
    )
    assert os.getsid(started["pid"]) == started["pid"], "it has no terminal"
    follow = subprocess.Popen([SHOAL, "logs", "--follow", "digits"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert follow.stdout is not None
    assert any(line == "algo-1 | variables algo-1\n" for line in follow.stdout)
    entered = shoal("exec", "digits", "--", "sh", "-c", "pwd; echo $TRAINING_JOB_NAME >&2; exit 5", code=5)
    assert (entered.stdout, entered.stderr) == (f"{tmp_path}/jobs/digits/algo-1/code\n", "digits\n")
    assert "digits  running" in shoal("ps").stdout
    stopped = "digits: stopped by SIGTERM (`shoal stop` or kill), exit code 143"
    assert f"{stopped}. Files: " in shoal("stop", "digits").stdout
    follow.communicate(timeout=60)
    (listed,) = list_jobs()
    assert (listed.state, listed.record.exit_code) == ("stopped", 128 + signal.SIGTERM)
    assert (tmp_path / "jobs/digits/report.html").exists()
    output = (tmp_path / "jobs/digits/shoal.log").read_text()
    assert "shoal: stopping; the script has 30 s to end" in output
    assert output.splitlines()[-1] == stopped
