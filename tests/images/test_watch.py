"""`shoal run --watch` without Docker: the loop, and options that it refuses."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import docker.errors
import pytest
from rich.console import Console

from shoal.commands import watch
from shoal.commands.run_options import RunOptions
from shoal.jobs.store import note_owners

from ..watching import SECONDS, Watching

SHOAL = Path(sys.executable).with_name("shoal")


@pytest.fixture
def watching(tmp_path: Path) -> Iterator[Watching]:
    source = tmp_path / "code"
    source.mkdir()
    (source / "train.py").write_text("print('one')")
    script, output = str(source / "train.py"), str(tmp_path / "jobs")
    words = (str(SHOAL), "run", "pytorch", script, "--engine", "none", "--watch", "--plain", "--output", output)
    made = Watching(words, source)
    yield made
    made.process.kill()
    made.process.wait()


def test_each_change_runs_the_script_again(watching: Watching, tmp_path: Path) -> None:
    assert "one" in watching.read_until("watching for changes")
    assert "ModuleNotFoundError" in watching.run_again("import helper\nprint('two', helper.x)")
    again = watching.run_again("x = 2", "helper.py")
    assert "changed: helper.py (new); running train.py again" in again and "two 2" in again
    writes = f"open({str(watching.source / 'losses.csv')!r}, 'w').write('1')\n"  # no edit
    watching.save(f"import time\n{writes}time.sleep(0.5)\nprint('it sleeps', flush=True)\ntime.sleep(1000)\n")
    watching.read_until("it sleeps")
    watching.save("print('four')")  # does not end the run
    watching.read_until("train.py; this run goes on, and Ctrl-C ends it")
    watching.process.send_signal(signal.SIGINT)
    output = watching.read_until("the next change runs it")
    assert "stopping; the script has" in output and "changed during the interrupted run: " in output
    assert "four" in watching.run_again("print('four')")
    watching.process.send_signal(signal.SIGINT)
    assert watching.process.wait(SECONDS) == 128 + signal.SIGINT
    assert len(os.listdir(tmp_path / "jobs")) == 5  # noqa: PTH208


def test_a_job_that_writes_beside_its_code_does_not_run_for_ever(watching: Watching) -> None:
    watching.read_until("watching for changes")
    place = watching.source / "losses.csv"
    script = f"import os, time\nprint('it runs')\nopen({str(place)!r}, 'a').write('x')\n"
    watching.run_again(script)
    assert "the job itself has changed losses.csv (new); this starts no run" in watching.read_until(
        "this starts no run"
    )
    watching.save(
        f"{script}print('it sleeps', flush=True)\nopen({str(watching.source / 'own.py')!r}, 'a').write('#')\n"
        "print('written', flush=True)\ntime.sleep(1000)"
    )
    watching.read_until("written")
    watching.process.send_signal(signal.SIGINT)
    watching.read_until("the next change runs it")
    watching.process.send_signal(signal.SIGINT)
    assert watching.process.wait(SECONDS) == 128 + signal.SIGINT


def test_a_source_of_another_user_is_not_run(watching: Watching) -> None:
    watching.read_until("watching for changes")
    os.chown(watching.source, 12345, -1)
    refused = watching.run_again("print('stolen')")
    assert "belongs to the user 12345 now" in refused and "stolen" not in refused


def test_a_source_of_another_user_is_not_run_after_a_first_run_that_failed_early(tmp_path: Path) -> None:
    source = tmp_path / "code"
    source.mkdir()
    (source / "train.py").write_text("print('one')")
    script, output = str(source / "train.py"), str(tmp_path / "file/jobs")
    (tmp_path / "file").write_text("no directory")
    words = (str(SHOAL), "run", "pytorch", script, "--engine", "none", "--watch", "--plain", "--output", output)
    made = Watching(words, source)
    try:
        first = made.read_until("watching for changes")
        (tmp_path / "file").unlink()
        os.chown(source, 12345, -1)
        refused = made.run_again("print('stolen')")
    finally:
        made.process.kill()
        made.process.wait()
    assert "one" not in first
    assert "belongs to the user 12345 now" in refused and "stolen" not in refused


def test_no_host_waits_with_a_source_of_another_user(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    options = RunOptions(image="pytorch", script=tmp_path / "train.py", watch=True)
    earlier = note_owners(options.to_record())
    os.chown(tmp_path, 12345, -1)
    opened: list[object] = []
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setattr(watch, "open_job", lambda *words: opened.append(words))
        assert watch._make_ready(options, Console(), stack, earlier) is None
    assert not opened


def test_hosts_that_cannot_be_removed_end_no_watch(capsys: pytest.CaptureFixture[str]) -> None:
    """Docker was restarted: the error is printed, and the command goes on."""

    def fail() -> None:
        raise docker.errors.DockerException("no answer")

    with watch._open_stack() as stack:
        stack.callback(fail)
    assert "no answer" in capsys.readouterr().err


def test_two_interrupts_of_a_run_end_the_command(watching: Watching) -> None:
    watching.read_until("watching for changes")
    stubborn = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    watching.save(f"{stubborn}print('it sleeps', flush=True)\ntime.sleep(1000)\n")
    watching.read_until("it sleeps")
    watching.process.send_signal(signal.SIGINT)
    watching.read_until("stopping; the script has")
    watching.process.send_signal(signal.SIGINT)
    assert watching.process.wait(SECONDS) == 128 + signal.SIGINT


def test_a_signal_to_end_ends_the_run_and_the_command(watching: Watching) -> None:
    watching.read_until("watching for changes")
    writes = f"open({str(watching.source / 'losses.csv')!r}, 'w').write('1')\n"  # no edit
    watching.save(f"import time\n{writes}time.sleep(0.5)\nprint('it sleeps', flush=True)\ntime.sleep(1000)\n")
    watching.read_until("it sleeps")
    watching.process.send_signal(signal.SIGTERM)
    assert watching.process.wait(SECONDS) == 128 + signal.SIGTERM
