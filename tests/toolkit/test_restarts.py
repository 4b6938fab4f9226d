"""Jobs that start again after a failure: SHOAL_MAX_RESTARTS."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal_toolkit.errors import HOST_LOST
from shoal_toolkit.job.contract import Paths
from shoal_toolkit.job.launchers import LAUNCHERS
from shoal_toolkit.job.settings import take_settings
from shoal_toolkit.output.pipes import FlowControl
from shoal_toolkit.plan.launcher import STANDBY
from shoal_toolkit.result.result import Result
from shoal_toolkit.run import standby
from shoal_toolkit.run.processes import HostProcesses
from shoal_toolkit.run.restarts import Restarts
from shoal_toolkit.run.standby import Standby
from shoal_toolkit.system.loop import Loop
from shoal_toolkit.system.process import signal_process
from shoal_toolkit.system.process_tree import find_descendants

from .conftest import TRAIN, Finished, Run, Tree, alive, clean_environment
from .loopback import NAMES, free_ports, two_trees
from .netns import UNAVAILABLE, init_of, running, two_hosts

KILLED = "rank {}: The script was killed by signal 9 (SIGKILL), and wrote nothing to stderr."
# Each start says who it is; the first one waits to be killed.
TALK = """\
import os, signal, sys, time
RANK, RESTART = os.environ.get("RANK", "0"), int(os.environ["SHOAL_RESTART"])
print("rank", RANK, "restart", RESTART, os.environ.get("SHOAL_RESTART_REASON"))
"""
DIE_ONCE = f"""{TALK}
if RESTART == 0:
    if RANK == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
"""


def lines_of_ranks(out: str) -> list[str]:
    """What the ranks printed, without prefixes."""
    return sorted(line[line.index("rank") :] for line in out.splitlines() if "rank" in line)


def until(path: Path, text: str, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists() or text not in path.read_text():
        assert time.monotonic() < deadline, path.read_text()
        time.sleep(0.01)


# What is restarted


@pytest.fixture
def restarts(tmp_path: Path) -> Restarts:
    (tmp_path / "output").mkdir()
    settings, _ = take_settings({"SHOAL_MAX_RESTARTS": "3"})
    return Restarts(settings, Paths(str(tmp_path)), {"restarts": []})


@pytest.mark.parametrize(
    ("code", "message"),
    [
        *[(1, "RuntimeError: x"), (137, "killed"), (HOST_LOST, "The host b was lost"), (3, ""), (255, "mpirun")],
        # Each of these may end well the next time.
        (1, "FileNotFoundError: [Errno 2] No such file or directory: 'vocab.json'"),
        (1, "OSError: [Errno 28] No space left on device"),
        (1, "OSError: [Errno 116] Stale file handle: '/opt/ml/input/data/train/x'"),
        (1, "RuntimeError: No CUDA GPUs are available"),
        (1, "KeyError: 'label'"),
        (1, "TypeError: 'NoneType' object is not iterable"),
        (1, "AttributeError: 'Batch' object has no attribute 'label'"),
        (1, "RuntimeError: DataLoader worker (pid 7) exited unexpectedly\nModuleNotFoundError: x"),
        (1, "ValueError: Some specified columns are not used"),
        (1, "torch.distributed.DistNetworkError: The client socket has timed out"),
    ],
)
def test_failures_that_restart_a_job(restarts: Restarts, code: int, message: str) -> None:
    assert restarts.explain_refusal(Result(code, message)) == ""


@pytest.mark.parametrize(
    ("code", "message"),
    [
        *[(2, "usage: train.py"), (127, "not found"), (126, "no"), (1, "SyntaxError: x")],
        (1, "ModuleNotFoundError: x"),
        (1, "/usr/local/bin/python3.11: No module named train\nrank 0"),
        (1, "/opt/venv/bin/python: No module named pkg.__main__; 'pkg' is a package and cannot be directly executed"),
        (1, "ImportError: cannot import name 'x' from 'y' (/opt/ml/code/y.py)"),
        (1, "NameError: name 'batch' is not defined. Did you mean: 'batches'?"),
        (1, "TypeError: TrainingArguments.__init__() got an unexpected keyword argument 'evaluate_strategy'"),
        (1, "TypeError: train() missing 1 required positional argument: 'config'"),
        (1, "TypeError: f() takes from 0 to 1 positional arguments but 2 were given"),
        (1, "AttributeError: module 'torch' has no attribute 'compiler_x'"),
        (1, "KeyError: 'SM_CHANNEL_TRAINING'"),
        (1, "OSError: libsndfile.so.1: cannot open shared object file: No such file or directory"),
        (1, "OSError: [Errno 30] Read-only file system: '/opt/ml/input/data/train/cache'"),
        (1, "ValueError: Some specified arguments are not used by the HfArgumentParser: ['--lr', '1']"),
        (1, "Could not override 'lrr'."),
    ],
)
def test_failures_that_would_occur_again_do_not(restarts: Restarts, code: int, message: str) -> None:
    assert "would occur again" in restarts.explain_refusal(Result(code, message))


@pytest.mark.mpi
def test_ranks_that_mpirun_ends_after_such_a_failure_restart_nothing(tree: Tree, run: Run) -> None:
    tree.script("import os, time\nif os.environ['RANK'] == '1': time.sleep(60)\nimport no_such_module")
    tree.hyperparameters(sagemaker_mpi_enabled=True, sagemaker_mpi_num_of_processes_per_host=2)
    assert run(SAGEMAKER_PROGRAM="train.py", SHOAL_MAX_RESTARTS="2").code == 1
    assert tree.report["restarts"] == []
    head, who, *_ = tree.failure.splitlines()
    assert head == "ModuleNotFoundError: No module named 'no_such_module'"
    assert who.startswith("rank 0 on ")
    assert "It was not restarted: this error would occur again." in tree.failure


def test_the_same_failure_without_a_checkpoint_in_between_ends_the_job(restarts: Restarts, tmp_path: Path) -> None:
    failure = Result(1, "ValueError: x\nrank 0 on a exited with code 1")
    restarts.begin(failure, {"rank": 0})
    assert "in the same way" in restarts.explain_refusal(failure)
    assert restarts.explain_refusal(Result(1, "ValueError: y")) == ""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-10").touch()
    assert restarts.explain_refusal(failure) == ""
    for message in ("was killed", "was killed"):
        assert restarts.explain_refusal(Result(137, message)) == ""
        restarts.begin(Result(137, message), {"rank": 0})
    assert "restarted 3 times (SHOAL_MAX_RESTARTS)" in restarts.explain_refusal(Result(137, "was killed"))


def test_the_log_counts_a_return_as_a_restart_but_not_against_the_limit(
    restarts: Restarts, capfd: pytest.CaptureFixture[str]
) -> None:
    restarts.begin(Result(137, "killed"), {"host": "b"})
    restarts.begin_growth("host b came back: 2 hosts", time.monotonic())
    restarts.begin(Result(137, "killed"), {"host": "b"})
    restarts.finish()
    first, second, end = capfd.readouterr().err.splitlines()
    assert first == "train: restart 1 (2 left of SHOAL_MAX_RESTARTS): killed"
    assert second == "train: restart 3 (1 left of SHOAL_MAX_RESTARTS): killed"
    assert end.startswith("train: restart 3: all ranks run again, after ")


def test_a_reason_is_one_line_without_secrets(restarts: Restarts) -> None:
    variables = restarts.begin(Result(1, "ValueError: \x1b[1m" + "x" * 999 + "\nmore"), {"rank": 4})
    assert variables["SHOAL_RESTART"] == "1"
    reason = variables["SHOAL_RESTART_REASON"]
    assert reason.startswith("rank 4: ValueError: ?[1mxxx")
    assert len(reason) < 350
    assert reason.isprintable()


# Jobs of one host


@pytest.mark.mpi
def test_a_killed_rank_starts_all_ranks_again(tree: Tree, run: Run) -> None:
    met = "open('up.' + RANK, 'w').close()\nwhile not os.path.exists('up.0'): time.sleep(0.01)\n"
    tree.script(DIE_ONCE.replace(TALK, TALK + met))
    tree.hyperparameters(sagemaker_mpi_enabled=True, sagemaker_mpi_num_of_processes_per_host=2)
    segments = set(Path("/dev/shm").rglob("*_segment*"))
    done = run(SAGEMAKER_PROGRAM="train.py", SHOAL_MAX_RESTARTS="2")
    assert done.code == 0, done.err
    reason = KILLED.format(1)
    assert lines_of_ranks(done.out) == [
        f"rank {rank} restart {n}" + f" {why}" for rank in "01" for n, why in [(0, None), (1, reason)]
    ]
    (restart,) = tree.report["restarts"]
    assert 0 < restart.pop("seconds") < 60
    assert time.time() - 60 < time.mktime(time.strptime(restart.pop("at"), "%Y-%m-%dT%H:%M:%SZ")) - time.timezone
    assert restart == {"number": 1, "reason": reason, "rank": 1}
    assert tree.outcome() == {"success"}
    assert f"restart 1 (1 left of SHOAL_MAX_RESTARTS): {reason}" in done.err
    assert "mpirun detected" not in done.err
    assert set(Path("/dev/shm").rglob("*_segment*")) <= segments


LISTEN_TWICE = f"""{TALK}
import pathlib, socket
port = int(os.environ["MASTER_PORT"])
if RANK == "0":
    with socket.create_server(("", port)):
        pathlib.Path("port.new").write_text(str(port))
    if RESTART == 0:
        os.rename("port.new", "port")
        while not os.path.exists("taken"): time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
if RESTART == 0: time.sleep(60)
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stranger_who_takes_the_port_of_a_rank_that_has_died_ends_no_job(tree: Tree, run: Run, ranks: int) -> None:
    tree.script(LISTEN_TWICE)
    if ranks > 1:
        tree.hyperparameters(sagemaker_mpi_enabled=True, sagemaker_mpi_num_of_processes_per_host=ranks)
    port = tree.base / "code" / "port"

    def take() -> None:
        until(port, "")
        with socket.create_server(("", int(port.read_text()))):
            (port.parent / "taken").touch()
            ended.wait(60)

    ended = threading.Event()
    stranger = threading.Thread(target=take)
    stranger.start()
    done = run(SAGEMAKER_PROGRAM="train.py", SHOAL_MAX_RESTARTS="1")
    ended.set()
    stranger.join()
    assert done.code == 0, done.err
    assert port.with_name("port.new").read_text() != port.read_text()


def test_a_job_that_fails_too_often_fails(tree: Tree, run: Run) -> None:
    tree.script(f"{TALK}raise ValueError(RESTART)")
    done = run(SAGEMAKER_PROGRAM="train.py", SHOAL_MAX_RESTARTS="3", SHOAL_RESTART="1")
    assert (done.code, tree.outcome()) == (1, {"failure"})
    assert [line.split()[3] for line in lines_of_ranks(done.out)] == ["1", "2", "3"]
    assert tree.failure.startswith("ValueError: 3\n")
    assert "It was restarted 3 times (SHOAL_MAX_RESTARTS)." in tree.failure
    assert [restart["number"] for restart in tree.report["restarts"]] == [2, 3]


def test_a_script_that_cannot_be_parsed_is_not_started_again(tree: Tree, run: Run) -> None:
    tree.script("if")
    done = run(SAGEMAKER_PROGRAM="train.py", SHOAL_MAX_RESTARTS="3")
    assert done.code == 1
    assert "It was not restarted: this error would occur again." in tree.failure
    assert tree.report["restarts"] == []


def test_the_failure_of_an_earlier_start_is_not_the_reason_of_the_last(tree: Tree, run: Run) -> None:
    tree.script(
        f"{TALK}print('stale', file=sys.stderr)\n"
        "if RESTART == 0: open(os.environ['SM_OUTPUT_DIR'] + '/failure', 'w').write('stale')\n"
        "sys.stderr.flush(); os.kill(os.getpid(), 9) if RESTART else sys.exit(3)"
    )
    done = run(SAGEMAKER_PROGRAM="train.py", SHOAL_MAX_RESTARTS="1")
    assert done.code == 137
    assert tree.report["restarts"][0]["reason"] == "rank 0: stale"
    assert not tree.failure.startswith("stale\nstale")


def test_a_stopped_job_is_not_restarted(tree: Tree) -> None:
    tree.script(f"{TALK}\nos.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(60)")
    environment = clean_environment(
        SAGEMAKER_BASE_DIR=str(tree.base), SAGEMAKER_PROGRAM="train.py", SHOAL_MAX_RESTARTS="9"
    )
    done = subprocess.run(TRAIN, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 143
    assert tree.report["restarts"] == []


def test_explain_shows_the_setting(tree: Tree, run: Run) -> None:
    tree.script("")
    done = run("--explain", SAGEMAKER_PROGRAM="train.py", SHOAL_MAX_RESTARTS="2", SHOAL_RESTART="1")
    assert "at most 2 times in all, and was restarted 1 times before" in done.out
    assert "SHOAL_RESTART=1" in done.out


def test_a_job_without_restarts_imports_nothing_of_them(tree: Tree) -> None:
    tree.script("")
    environment = clean_environment(SAGEMAKER_BASE_DIR=str(tree.base), SAGEMAKER_PROGRAM="train.py")
    code = "import sys; from shoal_toolkit.cli import main; main([]); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert "shoal_toolkit.run.single" in done.stdout
    assert not {"shoal_toolkit.run.restarts", "shoal_toolkit.run.standby"} & set(done.stdout.split())


# Several hosts


class Hosts:
    """Two hosts on loopback addresses, whose `train` is started and killed one by one."""

    def __init__(self, directory: Path, undo: ExitStack) -> None:
        self.trees = two_trees(directory)
        self.trains: dict[str, subprocess.Popen[str]] = {}
        self._undo = undo
        self._directory = directory
        self._ports = free_ports()

    def script(self, text: str, **hyperparameters: object) -> None:
        for tree in self.trees:
            tree.script(text)
            tree.hyperparameters(**hyperparameters)

    def log(self, name: str) -> Path:
        return self._directory / f"{name}.log"

    def start(self, name: str, **variables: str) -> None:
        environment = clean_environment(
            SAGEMAKER_BASE_DIR=str(self.trees[NAMES.index(name)].base),
            SAGEMAKER_PROGRAM="train.py",
            **{"SHOAL_MAX_RESTARTS": "3", **self._ports, **variables},
        )
        with self.log(name).open("a") as log:
            train = subprocess.Popen(TRAIN, env=environment, stdout=log, stderr=log, text=True)
        self._undo.enter_context(train)
        self._undo.callback(train.kill)
        self.trains[name] = train

    def lose(self, name: str) -> None:
        """Kill a host: `train`, and what it started."""
        train = self.trains[name]
        children = Path(f"/proc/{train.pid}/task/{train.pid}/children").read_text().split()
        for pid in (train.pid, *map(int, children)):
            os.kill(pid, signal.SIGKILL)
        train.wait()

    def lose_a_worker_that_trains(self, **environ: str) -> None:
        """Start all hosts, and kill the worker when its rank has started."""
        for name in NAMES:
            self.start(name, **environ)
        until(self.log(WORKER), "rank 1 restart 0")
        self.lose(WORKER)

    def wait(self) -> list[int]:
        return [self.trains[name].wait(60) for name in NAMES]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with ExitStack() as undo:
        yield Hosts(tmp_path, undo)


FIRST, WORKER = NAMES


@pytest.mark.parametrize("failing", ["0", "1"])
def test_a_rank_of_either_host_fails(hosts: Hosts, failing: str) -> None:
    hosts.script(DIE_ONCE.replace('RANK == "1"', f'RANK == "{failing}"'))
    for name in NAMES:
        hosts.start(name)
    assert hosts.wait() == [0, 0], hosts.log(FIRST).read_text()
    for tree, name, rank in zip(hosts.trees, NAMES, "01"):
        reason = KILLED.format(failing)
        assert f"rank {rank} restart 1 {reason}" in hosts.log(name).read_text()
        assert [restart["reason"] for restart in tree.report["restarts"]] == [reason]
        assert tree.outcome() == {"success"}


WAIT_ONCE = f"{TALK}\nif RESTART == 0: time.sleep(60)\n"


def test_a_lost_worker_comes_back(hosts: Hosts) -> None:
    hosts.script(WAIT_ONCE)
    for name in NAMES:
        hosts.start(name)
    until(hosts.log(WORKER), "rank 1 restart 0")
    until(hosts.log(FIRST), "rank 0 restart 0")
    first = hosts.trains[FIRST].pid
    hosts.lose(WORKER)
    until(hosts.log(FIRST), "restart 1 (2 left of SHOAL_MAX_RESTARTS)")
    hosts.start(WORKER)
    assert hosts.wait() == [0, 0], hosts.log(FIRST).read_text()
    assert not alive(first)
    reason = f"The host {WORKER} was lost: the connection was reset. Its own log says why, if it still can."
    assert f"rank 1 restart 1 The host {WORKER} was lost" in hosts.log(WORKER).read_text()
    (restart,) = hosts.trees[0].report["restarts"]
    assert (restart["host"], restart["reason"].partition(":")[0]) == (WORKER, reason.partition(":")[0])
    assert hosts.trees[1].report["restarts"] == hosts.trees[0].report["restarts"]


def test_a_worker_that_is_lost_again_during_the_restart(hosts: Hosts) -> None:
    """The replacement is lost while it sets up: that is one more restart, of the same start."""
    hosts.script(WAIT_ONCE)
    hosts.lose_a_worker_that_trains()
    until(hosts.log(FIRST), "restart 1 (2 left of SHOAL_MAX_RESTARTS)")
    (hosts.trees[1].code / "requirements.txt").write_text("")
    slow = hosts.trees[1].base / "slow"
    slow.mkdir()
    (slow / "sitecustomize.py").write_text(
        "import sys, time\nif 'shoal_toolkit.sidecars.install' in sys.orig_argv: time.sleep(60)\n"
    )
    hosts.start(WORKER, PYTHONPATH=str(slow))
    until(hosts.log(FIRST), f"{WORKER} has come back")
    hosts.lose(WORKER)
    until(hosts.log(FIRST), "restart 2 (1 left of SHOAL_MAX_RESTARTS)")
    (hosts.trees[1].code / "requirements.txt").unlink()
    hosts.start(WORKER)
    assert hosts.wait() == [0, 0], hosts.log(FIRST).read_text()
    assert "rank 0 restart 2" in hosts.log(FIRST).read_text()
    assert [restart["number"] for restart in hosts.trees[0].report["restarts"]] == [1, 2]


def test_a_worker_that_does_not_come_back(hosts: Hosts) -> None:
    hosts.script(WAIT_ONCE)
    hosts.lose_a_worker_that_trains(SHOAL_HOSTS_TIMEOUT="2")
    assert hosts.trains[FIRST].wait(30) == HOST_LOST
    assert f"After 2 s these hosts are missing: {WORKER}" in hosts.trees[0].failure
    assert "rank 0 restart 1" not in hosts.log(FIRST).read_text()


def test_a_signal_during_a_restart_ends_the_job(hosts: Hosts) -> None:
    hosts.script(WAIT_ONCE)
    hosts.lose_a_worker_that_trains()
    until(hosts.log(FIRST), "restart 1 (2 left of SHOAL_MAX_RESTARTS)")
    hosts.trains[FIRST].send_signal(signal.SIGTERM)
    assert hosts.trains[FIRST].wait(30) == 143
    assert "The job was stopped" in hosts.trees[0].failure


def test_a_lost_first_host_ends_the_workers(hosts: Hosts) -> None:
    hosts.script(WAIT_ONCE)
    for name in NAMES:
        hosts.start(name)
    until(hosts.log(WORKER), "rank 1 restart 0")
    hosts.lose(FIRST)
    assert hosts.trains[WORKER].wait(30) == HOST_LOST
    assert f"The first host {FIRST} was lost" in hosts.trees[1].failure


@pytest.mark.mpi
@pytest.mark.skipif(bool(UNAVAILABLE), reason=UNAVAILABLE)
def test_mpirun_on_two_hosts_after_a_killed_rank_and_a_lost_host(tmp_path: Path) -> None:
    """First a rank of the worker is killed, then the whole worker, which comes back under its name.

    mpirun ends rank 0 after rank 1. Here `train` learns about rank 0 first, because the worker's `train` is suspended.
    """
    meet = f"{TALK}from mpi4py import MPI\nprint('rank', RANK, 'of', MPI.COMM_WORLD.allreduce(1), 'at', RESTART)\n"
    with two_hosts(tmp_path) as hosts:
        for host in hosts:
            host.tree.script(f"{meet}if RESTART < 2: time.sleep(60)")
            host.tree.hyperparameters(sagemaker_mpi_enabled=True)
        first, worker = (host.start(SHOAL_MAX_RESTARTS="2") for host in hosts)
        with running(first, worker):
            for rank in (0, 1):
                until(hosts[0].file("out"), f"rank {rank} of 2 at 0")
            (_, mpirun, *_, script), (train, *_, failing) = map(find_descendants, map(init_of, (first, worker)))
            for pid in (mpirun, train):
                os.kill(pid, signal.SIGSTOP)
            os.kill(failing, signal.SIGKILL)
            os.kill(script, signal.SIGTERM)  # as mpirun does
            while alive(script):
                time.sleep(0.01)
            os.kill(train, signal.SIGCONT)
            until(hosts[0].file("err"), "restart 1 (1 left of SHOAL_MAX_RESTARTS): rank 1")
            signal_process(mpirun, signal.SIGCONT)
            until(hosts[0].file("out"), "rank 1 of 2 at 1")
            worker.kill()
            worker.wait()
            again = hosts[1].start(SHOAL_MAX_RESTARTS="2")
            with running(again):
                ends: list[Finished] = [hosts[0].finished(first), hosts[1].finished(again)]
        assert [end.code for end in ends] == [0, 0], ends[0].err + ends[1].err
        assert "rank 1 of 2 at 2" in ends[0].out
        wheres = [(each.get("rank"), each.get("host")) for each in hosts[1].tree.report["restarts"]]
        assert wheres == [(1, None), (None, "algo-2")]
        left = [path for path in hosts[0].temporary.iterdir() if path.name.startswith("shoal-")]
        assert left == [], "a run directory of an earlier start"


# The standby


class FakePlan:
    """What a standby reads of a plan."""

    launcher = LAUNCHERS["process"]
    by_mpirun = has_ranks = forks_ranks = False
    can_fork = True
    env: Mapping[str, str] = {}
    described: Mapping[str, str] = {}
    sidecars = removed = ()

    def __init__(self, script: Path) -> None:
        self.script = (sys.executable, str(script), "--epochs", "3")
        self.cwd = str(script.parent)


SHOW = """\
import json, os, sys
import numpy
print(json.dumps([os.environ["NAME"], sys.argv[1:], sys.path[0], os.getsid(0) == os.getpid(), os.getppid(), __name__,
                  float(numpy.random.rand())]), flush=True)
raise ValueError("boom")
"""


def test_a_standby_forks_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is a child of this one, and has imported numpy; its end, output and error are a script's."""
    (tmp_path / "train.py").write_text(SHOW)
    monkeypatch.setattr(standby, "_START_SECONDS", 0)
    loop = Loop()
    plan: Any = FakePlan(tmp_path / "train.py")
    made = Standby(loop, plan, dict(os.environ))
    codes: list[int] = []
    shown = []
    try:
        made.prepare()
        loop.run_until(lambda: made._pid > 0)
        ready: list[bool] = []
        made.when_ready(ready.append)
        loop.run_until(lambda: bool(ready))
        assert ready == [True]
        for name in ("first", "second"):
            with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
                pid = made.fork({**os.environ, "NAME": name}, (out.fileno(), err.fileno()), "")
            loop.on_child(pid, codes.append)
            wanted = len(codes) + 1
            loop.run_until(lambda wanted=wanted: len(codes) >= wanted)  # type: ignore[misc]
            shown.append(json.loads((tmp_path / "out").read_text()))
            assert (tmp_path / "err").read_text().endswith("ValueError: boom\n")
            assert "sidecars" not in (tmp_path / "err").read_text()
    finally:
        made.close()
        loop.close()
    assert codes == [1, 1]
    draws = {each.pop() for each in shown}
    assert len(draws) == 2, "numpy's random state is that of the standby"
    assert shown == [
        [name, ["--epochs", "3"], str(tmp_path), True, os.getpid(), "__main__"] for name in ("first", "second")
    ]


def test_a_signal_while_the_standby_imports_ends_the_command(tmp_path: Path) -> None:
    loop = Loop()
    plan: Any = FakePlan(tmp_path / "train.py")
    codes: list[int] = []
    events: Any = SimpleNamespace(on_command_ended=codes.append)
    processes = HostProcesses(loop, FlowControl(), plan, dict(os.environ), events)
    try:
        processes.keep_standby()
        assert processes._standby is not None
        processes._standby._start()
        processes.start()
        processes.stop(signal.SIGTERM)
        assert (codes, processes.running) == ([143], False)
    finally:
        processes.close()
        loop.close()


class TwoRanks(FakePlan):
    """A plan with two ranks of torchrun."""

    launcher, current_host, world_size = LAUNCHERS["torch_distributed"], "a", 2
    has_ranks = forks_ranks = True
    ranks: Mapping[str, int] = {"a": 2}

    @property
    def command(self) -> Sequence[str]:
        return (self.script[0], "-m", STANDBY, "--once", *self.script[1:])


@pytest.mark.parametrize("hangs", [False, True])
def test_ranks_start_without_a_standby_that_has_ended_or_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    """Then a process that imports nothing forks them."""
    script = tmp_path / "train.py"
    script.write_text("import os, sys\nprint(os.environ['RANK'], sys.argv[1:], 'torch' in sys.modules, flush=True)")
    monkeypatch.setattr(standby, "_ANSWER_SECONDS", 0.2)
    loop = Loop()
    plan: Any = TwoRanks(script)
    ends: list[tuple[int, ...]] = []
    output = [b"", b""]
    events: Any = SimpleNamespace(
        on_rank_started=lambda rank: None,
        on_rank_ended=lambda *end: ends.append(end),
        on_rank_output=lambda _, rank, data: output.__setitem__(rank, output[rank] + data),
        on_launcher_output=lambda *_: None,
        on_command_ended=lambda code: ends.append((code,)),
    )
    processes = HostProcesses(loop, FlowControl(), plan, dict(os.environ), events)
    try:
        processes.keep_standby()
        processes.prepare_restart({"SHOAL_RESTART": "1"})
        made = processes._standby
        assert made is not None
        made.start_now()
        waited: list[None] = []
        processes.await_standby(lambda: waited.append(None))
        loop.run_until(lambda: bool(waited))
        os.kill(made._pid, signal.SIGSTOP if hangs else signal.SIGKILL)
        if not hangs:
            loop.run_until(lambda: made._pid < 0)
        processes.start()
        loop.run_until(lambda: (0,) in ends)
    finally:
        processes.close()
        loop.close()
    assert sorted(ends) == [(0,), (0, 0), (1, 0)]
    assert output == [f"{rank} ['--epochs', '3'] False\n".encode() for rank in (0, 1)]


def test_a_standby_that_has_ended_forks_nothing(tmp_path: Path) -> None:
    loop = Loop()
    plan: Any = FakePlan(tmp_path / "train.py")
    made = Standby(loop, plan, dict(os.environ))
    ready: list[bool] = []
    try:
        made._start()
        os.kill(made._pid, signal.SIGKILL)
        made.when_ready(ready.append)
        loop.run_until(lambda: bool(ready))
        assert (ready, made.fork({}, (1, 2), "")) == ([False], 0)
    finally:
        made.close()
        loop.close()
