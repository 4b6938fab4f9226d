"""hosts/rsh.sh, which mpirun starts instead of ssh, and its other side in `train`."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest

from shoal_toolkit.hosts.daemons import DaemonRequests, SendExitCode
from shoal_toolkit.hosts.wire import Channel
from shoal_toolkit.plan.mpi import build_launch_agent
from shoal_toolkit.run.mpirun import Mpirun
from shoal_toolkit.system.loop import Loop

HOSTS = ("algo-2", "algo-3", "n" * 253)
COMMAND = r"PATH=/x:$PATH ; orted -mca a 'b  c' \n %s"


@contextmanager
def serving(directory: Path) -> Iterator[tuple[Loop, list[tuple[str, str, SendExitCode]]]]:
    """The side of `train`: its loop, and the requests that have come."""
    loop = Loop()
    came: list[tuple[str, str, SendExitCode]] = []
    requests = DaemonRequests(loop, str(directory), HOSTS, lambda *request: came.append(request))
    try:
        yield loop, came
    finally:
        requests.close()
        loop.close()


def ask(directory: Path, host: str) -> subprocess.Popen[bytes]:
    command = [*build_launch_agent().split(), host, *COMMAND.split(" ")]
    return subprocess.Popen(command, env={"SHOAL_RUN_DIR": str(directory)})


def serve(loop: Loop, came: list[tuple[str, str, SendExitCode]], count: int) -> None:
    loop.call_later(20, lambda: pytest.fail("no request"))
    loop.run_until(lambda: len(came) >= count)


def test_a_request_comes_as_it_is_and_ends_with_the_first_answer(tmp_path: Path) -> None:
    with serving(tmp_path) as (loop, came):
        agents = {host: ask(tmp_path, host) for host in HOSTS}
        serve(loop, came, len(HOSTS))
        assert {host: command for host, command, _ in came} == dict.fromkeys(HOSTS, COMMAND)
        assert all(agent.poll() is None for agent in agents.values()), "they wait"
        for code, (_, _, send_exit_code) in enumerate(came):
            send_exit_code(code)
            send_exit_code(99)
        assert {host: agents[host].wait(20) for host, _, _ in came} == {host: n for n, (host, _, _) in enumerate(came)}


def test_it_ends_with_255_without_an_answer(tmp_path: Path) -> None:
    """As ssh does: `train` has ended, the host has a daemon already, or is no other host of the job."""
    with serving(tmp_path) as (loop, came):
        waiting = ask(tmp_path, "algo-2")
        serve(loop, came, 1)
        assert [ask(tmp_path, host).wait(20) for host in ("algo-2", "algo-1", "../daemons")] == [255, 255, 255]
    assert waiting.wait(20) == 255
    assert ask(tmp_path / "gone", "algo-3").wait(20) == 255


def test_text_of_other_processes_is_ignored(tmp_path: Path) -> None:
    with serving(tmp_path) as (loop, came):
        with (tmp_path / "daemons").open("r+b", buffering=0) as fifo:
            fifo.write(b"algo-1\n../x\n\xff\n\n" + b"x" * 9000 + b"\n")
        agent = ask(tmp_path, "algo-3")
        serve(loop, came, 1)
        came[0][2](0)
        assert (came[0][0], agent.wait(20)) == ("algo-3", 0)


def test_a_request_that_is_missing_is_answered_with_255(tmp_path: Path) -> None:
    with serving(tmp_path) as (loop, came):
        reader = (tmp_path / "answers" / "algo-2").open("rb")
        with (tmp_path / "daemons").open("r+b", buffering=0) as fifo:
            fifo.write(b"algo-2\n")
        loop.step()
        with reader:
            assert reader.read() == b"255\n"
        assert came == []


def test_mpirun_closes_few_numbers_in_the_processes_that_request_daemons(tmp_path: Path) -> None:
    """Its limit of open files is low until the last request, and is back before the last daemon starts."""

    def read_limit() -> tuple[int, int]:
        return resource.prlimit(sleeping.pid, resource.RLIMIT_NOFILE)

    limits: list[tuple[int, int]] = []

    class Watched:
        def send(self, message: object) -> None:
            limits.append(read_limit())

    loop = Loop()
    mpirun = Mpirun(loop, dict.fromkeys(HOSTS, cast("Channel", Watched())), lambda: None)
    with subprocess.Popen(["sleep", "60"]) as sleeping:
        try:
            before = read_limit()
            mpirun.listen(str(tmp_path), HOSTS)
            mpirun.on_started(sleeping.pid)
            agents = [ask(tmp_path, host) for host in HOSTS]
            loop.call_later(60, lambda: pytest.fail("no request"))
            loop.run_until(lambda: len(limits) == len(HOSTS))
        finally:
            mpirun.close()
            loop.close()
            sleeping.kill()
    assert [agent.wait(20) for agent in agents] == [255] * len(HOSTS)
    low = (256 + 4 * len(HOSTS), before[1])
    assert limits == [low, low, before]
