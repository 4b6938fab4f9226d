"""Jobs that go on with fewer hosts, and grow when one comes back: SHOAL_MIN_HOSTS."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from shoal_toolkit.run.members import Members

from .netns import UNAVAILABLE, Host, many_hosts, running

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
