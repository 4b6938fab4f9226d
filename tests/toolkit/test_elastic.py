"""Jobs that go on with fewer hosts, and grow when one comes back: SHOAL_MIN_HOSTS."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal_toolkit.cli import plan_host
from shoal_toolkit.discovery.host_list import HostList, Registration
from shoal_toolkit.errors import ContractError
from shoal_toolkit.hosts import messages
from shoal_toolkit.job.contract import Paths, read_cluster
from shoal_toolkit.job.settings import take_settings
from shoal_toolkit.plan.elastic import check_elastic
from shoal_toolkit.plan.plan import LaunchPlan
from shoal_toolkit.run.members import Members
from shoal_toolkit.run.standby import list_rank_variables
from shoal_toolkit.run.worker import Worker

from ..repeats import SEED, times
from .conftest import Tree
from .netns import UNAVAILABLE, Host, many_hosts, running
from .test_restarts import until

NAMES = ("algo-1", "algo-2", "algo-3")
A, B, C = NAMES


@pytest.fixture
def members() -> Members:
    """A job of three hosts that needs two, before its start."""
    made = Members(NAMES, 2)
    made.add(B)
    return made


def ready(members: Members, *hosts: str) -> None:
    for host in hosts:
        members.note_ready(host)


def test_the_first_start_waits_for_all_hosts_until_the_time_limit(members: Members) -> None:
    ready(members, A, B)
    assert (members.are_ready, members.are_short, members.missing) == (False, True, [C])
    assert members.expect_present()
    assert (members.are_ready, members.are_short) == (True, False)
    assert members.start() == (A, B)


def test_the_time_limit_changes_nothing_without_enough_hosts(members: Members) -> None:
    members.remove(B)
    assert not members.expect_present()
    assert members.are_short
    assert not Members(NAMES, 3).expect_present()


def test_a_host_that_still_sets_up_at_the_time_limit_is_waited_for(members: Members) -> None:
    ready(members, A)
    members.expect_present()
    assert (members.are_ready, members.waiting_for) == (False, [B])


def test_a_lost_host_is_left_out_of_the_next_start(members: Members) -> None:
    members.add(C)
    ready(members, *NAMES)
    assert members.start() == NAMES
    members.remove(B)
    members.begin(1)
    assert (members.are_short, members.waiting_for) == (False, [A, C])
    ready(members, A, C)
    assert members.start() == (A, C)


def test_too_few_hosts_wait_for_any_other(members: Members) -> None:
    ready(members, A, B)
    members.expect_present()
    members.start()
    members.remove(B)
    members.begin(1)
    ready(members, A)
    assert (members.are_ready, members.are_short) == (False, True)
    members.add(C)
    assert (members.are_short, members.needs(C)) == (False, True)
    ready(members, C)
    assert members.start() == (A, C)


def test_a_host_that_comes_joins_the_next_start_when_it_is_ready(members: Members) -> None:
    ready(members, A, B)
    members.expect_present()
    members.start()
    members.add(C)
    assert (members.newcomers, members.needs(C)) == ((), False)
    members.begin(1)
    assert members.waiting_for == [A, B], "it still sets up"
    ready(members, A, B)
    assert members.start() == (A, B)
    ready(members, C)
    assert members.newcomers == (C,)
    members.begin(2)
    assert members.waiting_for == [A, B, C]


def test_a_job_that_is_not_elastic_waits_for_all_hosts() -> None:
    members = Members(NAMES, 3)
    for host in NAMES:
        members.add(host)
    ready(members, *NAMES)
    members.start()
    members.remove(C)
    members.begin(1)
    ready(members, A, B)
    assert (members.are_ready, members.are_short, members.needs(B)) == (False, True, True)


class IdleProcesses:
    """Processes of a host without any: they end at once."""

    def prepare_restart(self, variables: dict[str, str]) -> None:
        pass

    def end(self, on_ended: Callable[[None], None]) -> None:
        on_ended(None)

    def await_standby(self, on_ready: Callable[[], None]) -> None:
        on_ready()


@pytest.mark.parametrize("is_sooner", [True, False])
def test_a_host_that_comes_late_is_ready_once_for_each_start(monkeypatch: pytest.MonkeyPatch, is_sooner: bool) -> None:
    """Whether its own check or the first host's message about the job that runs is sooner."""
    worker = Worker.__new__(Worker)
    sent: list[Any] = []
    monkeypatch.setattr(worker, "_send", sent.append, raising=False)
    monkeypatch.setattr(worker, "processes", IdleProcesses(), raising=False)
    worker._number, worker._restarted, worker._was_ready, worker._facts = 0, False, False, {}
    steps: list[Callable[[], None]] = [
        lambda: worker._on_probed(""),
        lambda: worker._on_message(messages.PrepareRestart(0, "")),
    ]
    worker._is_set_up, worker._is_started = True, False
    for step in steps if is_sooner else reversed(steps):
        step()
    assert [each for each in sent if isinstance(each, messages.Ready)] == [messages.Ready(0)]
    worker._on_message(messages.PrepareRestart(1, "algo-2 came back"))
    assert sent[-1] == messages.Ready(1)


# Plans


def planned(tree: Tree, settings: dict[str, str], hosts: Sequence[str] = NAMES) -> tuple[LaunchPlan, Any]:
    """The plan of the last host, with the function that plans a start with some hosts."""
    tree.script("")
    tree.hosts(hosts[-1], *hosts)
    environ = {"SAGEMAKER_PROGRAM": "train.py", **settings}
    found, problem = take_settings(environ)
    assert problem is None
    paths = Paths(str(tree.base))
    return plan_host(paths, read_cluster(paths, "box"), environ, (), found)


def test_a_start_with_some_hosts_is_planned_as_a_job_of_them(tree: Tree) -> None:
    tree.hyperparameters(sagemaker_torch_distributed_enabled=True)
    whole, plan_with = planned(tree, {"SHOAL_MIN_HOSTS": "1"})
    pair = plan_with((B, C))
    assert (whole.hosts, whole.ranks, pair.hosts, pair.ranks) == (NAMES, dict.fromkeys(NAMES, 1), (B, C), {B: 1, C: 1})
    assert (pair.env["SM_HOSTS"], pair.env["SM_HOST_COUNT"], pair.env["MASTER_ADDR"]) == ('["algo-2","algo-3"]', "2", B)
    assert [variables["RANK"] for variables in list_rank_variables(pair)] == ["1"]
    alone = plan_with((C,))
    assert (alone.env["SM_HOSTS"], alone.env["MASTER_ADDR"], alone.world_size) == ('["algo-3"]', "127.0.0.1", 1)


def test_instance_groups_keep_the_hosts_of_the_start(tree: Tree) -> None:
    groups = [{"instance_group_name": "group", "instance_type": "ml.c5.xlarge", "hosts": list(NAMES)}]
    tree.script("")
    tree.hosts(C, *NAMES, instance_groups=groups, current_group_name="group")
    paths = Paths(str(tree.base))
    settings = take_settings({})[0]
    _, plan_with = plan_host(paths, read_cluster(paths, "box"), {"SAGEMAKER_PROGRAM": "train.py"}, (), settings)
    assert plan_with((A, C)).env["SM_CURRENT_INSTANCE_GROUP_HOSTS"] == '["algo-1","algo-3"]'


@pytest.mark.parametrize(
    ("hyperparameters", "least", "problem"),
    [
        ({}, "4", "SHOAL_MIN_HOSTS is 4, and the job has 3 hosts"),
        ({"sagemaker_mpi_enabled": True, "mp_parameters": {"partitions": 2}}, "2", "modelparallel"),
        ({"sagemaker_mpi_enabled": True, "sagemaker_mpi_num_processes": 2}, "2", "a fixed number of ranks"),
    ],
)
def test_jobs_that_cannot_be_elastic(tree: Tree, hyperparameters: dict[str, Any], least: str, problem: str) -> None:
    tree.hyperparameters(**hyperparameters)
    with pytest.raises(ContractError, match=problem):
        planned(tree, {"SHOAL_MIN_HOSTS": least})


def test_hosts_that_register_cannot_come_back() -> None:
    found = HostList("AWS Batch", (A, B), 0, "", registration=Registration("", "job"))
    job: Any = SimpleNamespace(cluster=SimpleNamespace(found=found, hosts=found.hosts), hyperparameters={})
    plan: Any = None
    assert check_elastic(take_settings({})[0], job, plan) == ()
    with pytest.raises(ContractError, match="get one another's addresses only once"):
        check_elastic(take_settings({"SHOAL_MIN_HOSTS": "1"})[0], job, plan)


@pytest.mark.parametrize("least", ["0", "x", "4097"])
def test_an_invalid_number_is_an_error(least: str) -> None:
    _, problem = take_settings({"SHOAL_MIN_HOSTS": least})
    assert "SHOAL_MIN_HOSTS" in str(problem)


def test_notes_on_an_elastic_job(tree: Tree) -> None:
    plan, _ = planned(tree, {"SHOAL_MIN_HOSTS": "2"})
    assert "this job is elastic: it needs at least 2 of its 3 hosts (SHOAL_MIN_HOSTS)" in plan.notes
    assert any("SHOAL_MAX_RESTARTS is not set" in note for note in plan.notes)
    plan, _ = planned(tree, {"SHOAL_MIN_HOSTS": "3"})
    assert not any("this job is elastic" in note for note in plan.notes)


# Jobs


class Job:
    """A job on three hosts, whose `train` is started and killed one by one. The output of a host is one text."""

    def __init__(self, hosts: list[Host], undo: ExitStack, **variables: str) -> None:
        self.hosts = dict(zip(NAMES, hosts))
        self.trains: dict[str, subprocess.Popen[bytes]] = {}
        self._undo = undo
        self._variables = variables

    def start(self, *names: str) -> None:
        for name in names:
            self.trains[name] = self.hosts[name].start(**self._variables)
            self._undo.enter_context(running(self.trains[name]))

    def lose(self, name: str) -> None:
        self.trains[name].kill()
        self.trains[name].wait()

    def read(self, name: str) -> str:
        return "".join(self.hosts[name].file(stream).read_text() for stream in ("out", "err"))

    def wait_for(self, name: str, text: str, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while text not in self.read(name):
            assert time.monotonic() < deadline, self.read(A) + self.read(name)
            time.sleep(0.02)

    def wait(self, seconds: float = 60) -> list[int]:
        return [self.trains[name].wait(seconds) for name in NAMES]


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def hosts(tmp_path: Path, undo: ExitStack) -> list[Host]:
    if UNAVAILABLE:
        pytest.skip(UNAVAILABLE)
    return undo.enter_context(many_hosts(tmp_path, len(NAMES)))


# Ends at the third start. Before, it waits for its end, and saves then.
SCRIPT = """\
import os, signal, sys, time
world = [os.environ["SM_CURRENT_HOST"], os.environ["RANK"], "of", os.environ["WORLD_SIZE"], os.environ["SM_HOSTS"]]

def save(*_):
    time.sleep(0.3)
    print("saved", *world, flush=True)
    sys.exit(143)

signal.signal(signal.SIGTERM, save)
print("runs", os.environ["SHOAL_RESTART"], *world, os.environ.get("SHOAL_RESTART_REASON"), flush=True)
if os.environ["SHOAL_RESTART"] != "2":
    time.sleep(60)
"""


def test_a_job_shrinks_and_grows(hosts: list[Host], undo: ExitStack) -> None:
    for host in hosts:
        host.tree.script(SCRIPT)
    job = Job(hosts, undo, SHOAL_MIN_HOSTS="2", SHOAL_MAX_RESTARTS="1")
    job.start(*NAMES)
    for name in NAMES:
        job.wait_for(name, "runs 0")
    job.lose(B)
    job.wait_for(A, "runs 1 algo-1 0 of 2")
    job.wait_for(C, 'runs 1 algo-3 1 of 2 ["algo-1","algo-3"] The host algo-2 was lost')
    job.start(B)
    assert job.wait() == [0, 0, 0], job.read(A)
    reason = "host algo-2 came back: 3 hosts"
    for rank, (name, host) in enumerate(job.hosts.items()):
        assert f'runs 2 {name} {rank} of 3 ["algo-1","algo-2","algo-3"] {reason}' in job.read(name)
        shrunk, grown = host.tree.report["restarts"]
        assert (shrunk["host"], shrunk["reason"].partition(":")[0]) == (B, "The host algo-2 was lost")
        assert (grown["number"], grown["reason"], grown["counted"]) == (2, reason, False)
        assert (host.tree.report["hosts"], host.tree.report["ranks"]) == (list(NAMES), 3)
        assert host.tree.outcome() == {"success"}
    for name in (A, C):
        assert f"saved {name}" in job.read(name), "ranks are not killed for a host that comes"


def test_a_job_begins_with_the_hosts_that_have_come(hosts: list[Host], undo: ExitStack) -> None:
    for host in hosts:
        host.tree.script(SCRIPT)
    job = Job(hosts, undo, SHOAL_MIN_HOSTS="2", SHOAL_HOSTS_TIMEOUT="2", SHOAL_RESTART="1", SHOAL_MAX_RESTARTS="1")
    job.start(A, C)
    job.wait_for(C, "runs 1 algo-3 1 of 2")
    assert "beginning with 2 of 3 hosts (SHOAL_MIN_HOSTS). After 2 s these hosts are missing" in job.read(A)
    job.start(B)
    assert job.wait() == [0, 0, 0], job.read(A)
    assert "runs 2 algo-2 1 of 3" in job.read(B)


# Runs until the file of the test exists, and saves for a moment when it is to end.
ENDLESS = """\
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.2), sys.exit(143)))
print("runs", os.environ["SHOAL_RESTART"], os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
with open("world", "w") as file:
    file.write(os.environ["WORLD_SIZE"])
while not os.path.exists({!r}):
    time.sleep(0.02)
"""


@pytest.mark.long
@pytest.mark.soak
@pytest.mark.parametrize("launcher", ["process", pytest.param("mpirun", marks=pytest.mark.mpi)])
def test_hosts_lost_at_random_moments(hosts: list[Host], undo: ExitStack, tmp_path: Path, launcher: str) -> None:
    """Also during restarts and growths, and while they set up. The job goes on each time, and ends on all hosts."""
    for host in hosts:
        host.tree.script(ENDLESS.format(str(tmp_path / "end")))
        host.tree.hyperparameters(sagemaker_mpi_enabled=launcher == "mpirun")
    job = Job(hosts, undo, SHOAL_MIN_HOSTS="1", SHOAL_MAX_RESTARTS="999")
    job.start(*NAMES)
    job.wait_for(A, "runs 0")
    chance = random.Random(SEED)
    while len(hosts[0].tree.report["restarts"]) < times(5, 100):
        name = chance.choice((B, C))
        job.lose(name)
        (job.hosts[name].tree.code / "world").unlink(missing_ok=True)
        time.sleep(chance.choice((0, 0.1, 0.4, 0.8)))
        job.start(name)
        time.sleep(chance.choice((0, 0.2, 0.5, 0.9, 2)))
        assert job.trains[A].poll() is None, job.read(A)
    until(job.hosts[B].tree.code / "world", "3")
    until(job.hosts[C].tree.code / "world", "3")
    (tmp_path / "end").touch()
    assert job.wait() == [0, 0, 0], job.read(A)
    assert [host.tree.outcome() for host in hosts] == [{"success"}] * 3
    restarts = hosts[0].tree.report["restarts"]
    assert [restart["number"] for restart in restarts] == list(range(1, len(restarts) + 1))
    reasons = [restart["reason"] for restart in restarts]
    assert [reason for reason in reasons if "came back" not in reason and "was lost" not in reason] == [], job.read(A)
