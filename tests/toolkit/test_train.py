"""`train` with a plain process on one host, from the command to the files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shoal_toolkit import __version__
from shoal_toolkit.system import process

from . import loopback
from .conftest import TRAIN, Run, Tree, alive, clean_environment
from .loopback import two_trees


def test_version() -> None:
    done = subprocess.run([*TRAIN, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"train (shoal-toolkit) {__version__}\n"


def test_the_script_gets_its_arguments_and_variables(tree: Tree, run: Run) -> None:
    tree.script("import json, os, sys; print(json.dumps([sys.argv, dict(os.environ), os.getcwd()]))")
    tree.hyperparameters(lr=0.1, epochs=3)
    done = run("--more", "a b", SAGEMAKER_PROGRAM="train.py", SHOAL_JOB_SECRET="s3cret")
    argv, environ, cwd = json.loads(done.out)
    assert done.code == 0
    assert argv == ["train.py", "--epochs", "3", "--lr", "0.1", "--more", "a b"]
    assert cwd == str(tree.code)
    assert environ["SM_HP_EPOCHS"] == "3"
    # Nothing but `train` has started it: it may start ranks itself.
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"} & {*environ}
    assert {name for name in environ if name.startswith("SHOAL_")} == {"SHOAL_JOB", "SHOAL_RESTART", "SHOAL_STOP_GRACE"}
    assert "s3cret" not in done.out + done.err


@pytest.mark.parametrize("launcher", [{}, pytest.param({"sagemaker_mpi_enabled": True}, marks=pytest.mark.mpi)])
def test_a_script_of_the_image_by_its_absolute_path(tree: Tree, run: Run, tmp_path: Path, launcher: Any) -> None:
    """As AWS's guide has it in an own container: entry_point="/opt/ml/code/train.py"."""
    script = tmp_path / "image" / "train.py"
    script.parent.mkdir()
    script.write_text("import os; print('ran in', os.getcwd())")
    tree.hyperparameters(**launcher)
    done = run(SAGEMAKER_PROGRAM=str(script))
    assert (done.code, f"ran in {tree.code}" in done.out) == (0, True), done.err


def test_a_successful_script_leaves_success_and_a_report(tree: Tree, run: Run) -> None:
    tree.script("import sys; print('out'); print('err', file=sys.stderr)")
    done = run(SAGEMAKER_PROGRAM="train.py")
    assert (done.code, done.out) == (0, "out\n")
    assert done.err.endswith("\nerr\n")
    assert tree.outcome() == {"success"}
    report = tree.report
    assert (report["ranks"], report["launcher"], report["exit_code"]) == (1, "process", 0)
    assert 0 < report["launch_seconds"] < 5
    assert report["training_seconds"] > 0


@pytest.mark.mpi
def test_a_script_that_mpirun_did_not_start_can_import_mpi4py(tree: Tree, run: Run) -> None:
    tree.script("from mpi4py import MPI; print(MPI.COMM_WORLD.size)")
    done = run(SAGEMAKER_PROGRAM="train.py")
    assert (done.code, done.out) == (0, "1\n"), done.err


def test_a_stale_result_does_not_survive(tree: Tree, run: Run) -> None:
    tree.output.mkdir()
    (tree.output / "failure").write_text("yesterday's")
    tree.script("import os; print(os.path.exists('../output/failure'))")
    assert run(SAGEMAKER_PROGRAM="train.py").out == "False\n"
    assert tree.outcome() == {"success"}


def test_the_scripts_exit_code_is_the_jobs(tree: Tree, run: Run) -> None:
    tree.script("raise SystemExit(42)")
    assert run(SAGEMAKER_PROGRAM="train.py").code == 42
    assert tree.outcome() == {"failure"}
    assert "rank 0 on" in tree.failure
    assert tree.report["exit_code"] == 42


def test_the_exception_comes_first(tree: Tree, run: Run) -> None:
    """Defect 12: the stock toolkit's failure file holds ErrorMessage ""."""
    tree.script("def f():\n    raise ValueError('boom')\nf()\n")
    done = run(SAGEMAKER_PROGRAM="train.py")
    assert done.code == 1
    lines = tree.failure.splitlines()
    assert lines[0] == "ValueError: boom"
    assert lines[1].startswith("rank 0 on ")
    assert lines[-1] == "ValueError: boom"
    assert "in f" in tree.failure
    assert done.err.count("Traceback") == 1


def test_a_script_killed_by_a_signal(tree: Tree, run: Run) -> None:
    tree.script("import os; os.kill(os.getpid(), 9)")
    assert run(SAGEMAKER_PROGRAM="train.py").code == 137
    assert "was killed by signal 9 (SIGKILL)" in tree.failure


@pytest.mark.parametrize("code", [0, 42])
def test_an_output_directory_that_cannot_be_written(tree: Tree, run: Run, code: int) -> None:
    """Defect 1: the stock toolkit exits with 0 there."""
    tree.output.write_text("a file is in the way")
    tree.script(f"raise SystemExit({code})")
    done = run(SAGEMAKER_PROGRAM="train.py")
    assert done.code != 0
    assert "output directory cannot be written" in done.err


def test_a_fault_of_our_own_is_never_a_success(tree: Tree, tmp_path: Path) -> None:
    """Defect 2: an OSError without errno in the stock toolkit exits with 0."""
    tree.script("")
    broken = (
        "import shoal_toolkit.cli as c\ndef b(*_, **__): raise OSError('no errno')\n"
        "c.plan_host = b\nraise SystemExit(c.main([]))"
    )
    environment = clean_environment(SAGEMAKER_BASE_DIR=str(tree.base), SAGEMAKER_PROGRAM="train.py")
    done = subprocess.run([sys.executable, "-c", broken], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert tree.failure.startswith("OSError: no errno\nThis is a bug in shoal-toolkit")
    assert "Traceback" in tree.failure
    assert tree.outcome() == {"failure"}


def test_a_fault_of_our_own_is_reported_to_the_other_hosts(tmp_path: Path) -> None:
    trees = two_trees(tmp_path)
    for tree in trees:
        tree.script("")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "sitecustomize.py").write_text(
        "import shoal_toolkit.cli as c\ndef b(*_, **__): raise OSError('no errno')\nc.plan_host = b\n"
    )
    with loopback.started(trees, (":", f"export PYTHONPATH={tmp_path}/broken")) as trains:
        assert [train.wait(20) for train in trains] == [1, 1]
    assert trees[0].failure.startswith(f"On {loopback.NAMES[1]}: OSError: no errno")


@pytest.mark.parametrize("host", loopback.NAMES)
def test_a_script_that_removes_the_output_directory(tmp_path: Path, host: str) -> None:
    """It is made again for the result, on a worker too."""
    trees = two_trees(tmp_path)
    for tree in trees:
        tree.script(f"import os, shutil\nif os.environ['SM_CURRENT_HOST'] == {host!r}: shutil.rmtree('../output')")
    with loopback.started(trees) as trains:
        assert [train.wait(20) for train in trains] == [0, 0]
    assert [tree.outcome() for tree in trees] == [{"success"}, {"success"}]


def test_a_shell_script(tree: Tree, run: Run) -> None:
    tree.script('echo "$0 $*"; printf "%s\\n" "$SM_HP_BATCH_SIZE"; exit 7', "go.sh")
    tree.hyperparameters(**{"batch-size": 8})
    done = run("x y", SAGEMAKER_PROGRAM="go.sh")
    assert (done.code, done.out) == (7, "./go.sh --batch-size 8 x y\n8\n")


def test_an_executable(tree: Tree, run: Run) -> None:
    (tree.code / "tool").symlink_to("/bin/echo")
    assert run("hi", SAGEMAKER_PROGRAM="tool").out == "hi\n"


def test_an_interpreter_that_is_missing(tree: Tree, run: Run) -> None:
    tree.script("#!/no/such/interpreter\n", "go")
    assert run(SAGEMAKER_PROGRAM="go").code == 1
    assert "'/no/such/interpreter' cannot be started" in tree.failure


@pytest.mark.parametrize(
    ("value", "reason"),
    [("a\0b", "embedded null byte"), ("\ud800", "surrogate")],
)
def test_values_that_no_process_can_be_given(tree: Tree, run: Run, value: str, reason: str) -> None:
    tree.script("")
    tree.hyperparameters(text=value)
    assert run(SAGEMAKER_PROGRAM="train.py").code == 1
    assert "cannot be started" in tree.failure
    assert reason in tree.failure


def test_output_arrives_as_it_is_written(tree: Tree) -> None:
    """Defect 11: the stock toolkit's capture mode shows it at the end, without indentation."""
    tree.script(
        "import os, sys, time\nfor f in (sys.stdout, sys.stderr):\n    print('  é', file=f)\n"
        "while not os.path.exists('go'): time.sleep(.01)"
    )
    environment = clean_environment(SAGEMAKER_BASE_DIR=str(tree.base), SAGEMAKER_PROGRAM="train.py")
    with subprocess.Popen(TRAIN, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as train:
        assert train.stdout
        assert train.stderr
        assert train.stdout.readline() == "  é\n"
        while not (line := train.stderr.readline()).startswith("  é"):
            assert line
        (tree.code / "go").touch()
        assert train.wait(20) == 0


def test_sigterm_reaches_the_script_which_may_save_its_work(tree: Tree) -> None:
    """Defect 9: the stock toolkit orphans the script, and writes no failure file."""
    tree.script(
        "import signal, sys, time\n"
        "def stop(*_):\n    open('saved', 'w').close(); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, stop); print('up')\ntime.sleep(60)\n"
    )
    with started(tree) as train:
        train.send_signal(signal.SIGTERM)
        assert train.wait(20) == 143
    assert (tree.code / "saved").exists()
    assert "The job was stopped: `train` received SIGTERM" in tree.failure


@pytest.mark.parametrize("way", ["setsid", "timeout 60"])
def test_sigterm_reaches_what_is_in_a_group_of_its_own(tree: Tree, way: str) -> None:
    """The signal ends the shell at once, but `train` waits until its child has ended."""
    saves = "def stop(*_):\n    time.sleep(1); open('saved', 'w').close(); sys.exit(0)\n"
    tree.script(f"import signal, sys, time\n{saves}signal.signal(15, stop); print('up', flush=True); time.sleep(60)")
    tree.script(f"{way} {sys.executable} train.py & wait", "go.sh")
    with started(tree, SAGEMAKER_PROGRAM="go.sh") as train:
        train.send_signal(signal.SIGTERM)
        assert train.wait(20) == 143
    assert (tree.code / "saved").exists()


IGNORES = "import signal, time\nsignal.signal(15, lambda *_: print('no'))\nprint('up')\nwhile True: time.sleep(60)\n"


def test_a_stop_is_on_record_before_the_script_has_ended(tree: Tree) -> None:
    """`docker stop` kills after 10 s by default."""
    tree.script(
        "import os, signal, time\nsignal.signal(15, lambda *_: print('no', os.getpid()))\nprint('up')\n"
        "while True: time.sleep(60)"
    )
    with started(tree) as train:
        train.send_signal(signal.SIGTERM)
        assert train.stdout
        no, script = train.stdout.readline().split()
        assert no == "no"
        train.kill()
        os.kill(int(script), signal.SIGKILL)  # nobody else does, outside a container
    assert "was stopped" in tree.failure
    assert tree.outcome() == {"failure"}


@pytest.mark.parametrize("again", [True, False])
def test_a_script_that_ignores_sigterm_is_killed(tree: Tree, again: bool) -> None:
    """After the grace period, or at a second signal, which is none if it follows at once."""
    tree.script(IGNORES)
    with started(tree, SHOAL_STOP_GRACE="60" if again else "1") as train:
        train.send_signal(signal.SIGTERM)
        assert train.stdout
        assert train.stdout.readline() == "no\n"
        deadline = time.monotonic() + 20
        while train.poll() is None:
            assert time.monotonic() < deadline
            if again:
                train.send_signal(signal.SIGTERM)
            time.sleep(0.1)
        assert train.returncode == 143
    assert "was stopped" in tree.failure


@pytest.mark.parametrize(
    ("script", "is_reported"), [("./raise.sh | cat\n", True), ("./raise.sh\ndate", True), ("date", False)]
)
def test_a_failure_that_a_shell_hides_is_not_silent(tree: Tree, run: Run, script: str, is_reported: bool) -> None:
    (tree.code / tree.script(f"#!{sys.executable}\nraise ValueError('boom')\n", "raise.sh")).chmod(0o755)
    done = run(SAGEMAKER_PROGRAM=tree.script(script, "go.sh"))
    assert done.code == 0, done.err
    assert ("a command in it raised an exception: ValueError: boom" in done.err) == is_reported


def test_a_training_that_the_script_does_not_wait_for_is_named(tree: Tree, run: Run) -> None:
    tree.script("import subprocess; subprocess.Popen(['sleep', '60'])")
    done = run(SAGEMAKER_PROGRAM="train.py")
    assert done.code == 0
    assert "the script has ended; processes that it left running are killed: sleep 60" in done.err


@pytest.mark.parametrize("shown", [("D", None), ("S", "0")], ids=["waits for its disk", "has no environment yet"])
def test_a_daemon_that_has_just_been_started_is_found(
    monkeypatch: pytest.MonkeyPatch, shown: tuple[str, str | None]
) -> None:
    """As the kernel may show it just after its parent goes on."""
    state, end = shown
    daemon = subprocess.Popen(["sleep", "60"], env={process.MARK: "daemon"}, start_new_session=True)
    left, stat, carries = [6], process.read_stat, process._has_mark

    def stat_at_first(pid: int) -> list[str]:
        fields = stat(pid)
        if pid == daemon.pid and left[0]:
            left[0] -= 1
            fields[0], fields[48] = state, end or fields[48]
        return fields

    monkeypatch.setattr(process, "read_stat", stat_at_first)
    monkeypatch.setattr(
        process, "_has_mark", lambda pid, mark: not (pid == daemon.pid and left[0]) and carries(pid, mark)
    )
    try:
        assert process.kill_left_behind(-1, "daemon", int(process.read_start_time(daemon.pid))) == ["sleep 60"]
        assert daemon.wait(timeout=30) == -signal.SIGKILL
    finally:
        daemon.kill()
        daemon.wait()


@pytest.mark.parametrize("daemon", [False, True])
def test_what_the_script_leaves_behind_is_ended(tree: Tree, run: Run, daemon: bool) -> None:
    """Also what has left the script's session and group."""
    tree.script(f"import subprocess; print(subprocess.Popen(['sleep', '60'], start_new_session={daemon}).pid)")
    done = run(SAGEMAKER_PROGRAM="train.py")
    assert done.code == 0
    await_end(int(done.out))


def test_what_a_job_inside_the_job_leaves_behind_is_ended(tree: Tree, run: Run) -> None:
    tree.script("import os, time; print(os.getpid(), flush=True); time.sleep(60)", "inner.py")
    inner = (
        f"subprocess.Popen({TRAIN!r}, env={{**os.environ, 'SAGEMAKER_PROGRAM': 'inner.py'}}, stdout=subprocess.PIPE)"
    )
    tree.script(f"import os, subprocess; print({inner}.stdout.readline().decode())")
    done = run(SAGEMAKER_PROGRAM="train.py")
    assert done.code == 0, done.err
    await_end(int(done.out))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_a_group_in_which_only_another_users_process_is_left() -> None:
    """The kernel refuses to signal it: a script may have left a program with the setuid bit."""
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as other:
        signalled = (
            "import os, signal\nfrom shoal_toolkit.system.process import signal_group\nos.setuid(65534)\n"
            f"print(signal_group({other.pid}, signal.SIGKILL))"
        )
        done = subprocess.run([sys.executable, "-c", signalled], capture_output=True, text=True)
        assert (done.stdout, done.stderr) == ("False\n", "")
        assert other.poll() is None
        other.kill()


@pytest.mark.parametrize("descriptor", [0, 1, 2])
def test_a_descriptor_that_is_closed(tree: Tree, descriptor: int) -> None:
    tree.script("print('trained')")
    environment = clean_environment(SAGEMAKER_BASE_DIR=str(tree.base), SAGEMAKER_PROGRAM="train.py")
    command = ["/bin/sh", "-c", f'exec "$@" {descriptor}>&-', "sh", *TRAIN]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "" if descriptor == 1 else "trained\n")
    assert tree.outcome() == {"success"}


@pytest.mark.parametrize(
    ("name", "value"), [("SHOAL_STOP_GRACE", "soon"), ("SHOAL_STOP_GRACE", "²"), ("SHOAL_AGENT_PORT", "70000")]
)
def test_settings_that_are_wrong(tree: Tree, run: Run, name: str, value: str) -> None:
    tree.script("")
    assert run(SAGEMAKER_PROGRAM="train.py", **{name: value}).code == 2
    assert f"The variable {name} is {value!r}; it must be a whole number" in tree.failure


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("SHOAL_HOST_TIMEOUT", "12", "SHOAL_HOSTS_TIMEOUT"),
        ("SHOAL_STOPGRACE", "12", "SHOAL_STOP_GRACE"),
        ("SHOAL_SECRET", "words", "SHOAL_JOB_SECRET"),
        ("SHOAL_PORT", "12", ""),
        ("SHOAL_JOB_PORT", "tcp://10.0.0.1:7411", ""),  # Kubernetes sets these two where a service is called so
        ("SHOAL_AGENT_SERVICE_PORT", "7411", ""),
        ("SHOAL_REHEARSE_TOLD", "1", ""),
    ],
)
def test_a_setting_that_is_misspelt_is_reported(tree: Tree, run: Run, name: str, value: str, meant: str) -> None:
    tree.script("print('trained')")
    done = run(SAGEMAKER_PROGRAM="train.py", **{name: value})
    assert (done.code, done.out) == (0, "trained\n")
    warning = f"train: the variable {name} is not known to this toolkit. Did you mean {meant!r}?"
    assert (warning in done.err) if meant else (name not in done.err)


def test_the_start_is_quick_because_nothing_heavy_is_imported(tree: Tree) -> None:
    tree.script("")
    environment = clean_environment(SAGEMAKER_BASE_DIR=str(tree.base), SAGEMAKER_PROGRAM="train.py")
    code = "import sys; from shoal_toolkit.cli import main; main([]); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {sys.path!r}; {code}"],
        env=environment,
        capture_output=True,
        text=True,
    )
    heavy = {
        "argparse",
        "asyncio",
        "boto3",
        "dataclasses",
        "logging",
        "pathlib",
        "shutil",
        "socket",
        "subprocess",
        "tempfile",
        "threading",
    }
    assert not heavy & set(done.stdout.split())
    assert "shoal_toolkit.run.single" in done.stdout


def await_end(pid: int) -> None:
    deadline = time.monotonic() + 30
    while alive(pid):
        assert time.monotonic() < deadline, f"{pid} still runs"
        time.sleep(0.01)


def started(tree: Tree, **variables: str) -> subprocess.Popen[str]:
    """Start `train`, and return when the script has printed its first line."""
    variables = {"SAGEMAKER_BASE_DIR": str(tree.base), "SAGEMAKER_PROGRAM": "train.py", **variables}
    environment = clean_environment(**variables)
    train = subprocess.Popen(TRAIN, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert train.stdout
    assert train.stdout.readline() == "up\n"
    return train
