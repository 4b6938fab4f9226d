"""Ranks that have left the process group that was reported for them, whose number strangers have got."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from shoal_toolkit.output.pipes import FlowControl
from shoal_toolkit.plan import rank_shell
from shoal_toolkit.run.ranks import LocalRanks
from shoal_toolkit.sidecars.standby_ranks import _wait
from shoal_toolkit.system.loop import Loop


@pytest.fixture
def stranger() -> Iterator[int]:
    """A group with a process that neither leads it nor has its leader as its parent."""
    shell = subprocess.Popen(
        ["sh", "-c", "(sleep 50 & echo $!) ; exec sleep 50"], stdout=subprocess.PIPE, start_new_session=True
    )
    assert shell.stdout is not None
    shell.stdout.readline()
    with shell:
        yield shell.pid
        assert shell.poll() is None, "the stranger was signalled"
        os.killpg(shell.pid, signal.SIGKILL)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[LocalRanks]:
    loop = Loop()
    made = LocalRanks(loop, FlowControl(), str(tmp_path), 0, Mock())
    yield made
    made.finish()
    loop.close()


def report(directory: Path, ranks: LocalRanks, *lines: str) -> None:
    with (directory / rank_shell.EVENTS).open("w") as events:
        events.write("".join(f"{line}\n" for line in lines))
        events.flush()
        ranks.read_reports()


def test_a_rank_with_a_session_of_its_own_is_signalled_and_not_a_stranger(
    tmp_path: Path, ranks: LocalRanks, stranger: int
) -> None:
    with subprocess.Popen(["sleep", "5"], start_new_session=True) as rank:
        report(tmp_path, ranks, f"forked 0 0 {rank.pid} {stranger}")
        ranks.signal(signal.SIGTERM)
    assert rank.returncode == -signal.SIGTERM


def test_a_stranger_does_not_delay_the_end_of_a_rank(tmp_path: Path, stranger: int) -> None:
    loop, events = Loop(), Mock()
    ranks = LocalRanks(loop, FlowControl(), str(tmp_path), 0, events)
    with subprocess.Popen(["sleep", "5"], start_new_session=True) as rank:
        report(tmp_path, ranks, f"forked 0 0 {rank.pid} {stranger}")
        ranks.stop(signal.SIGTERM)
    report(tmp_path, ranks, "end 0 143")
    events.on_rank_ended.assert_called_once_with(0, 143)
    ranks.finish()
    loop.close()


def test_signals_of_mpirun_reach_a_rank_with_a_session_of_its_own(stranger: int) -> None:
    ours, theirs = socket.socketpair()
    waiting = os.fork()
    if waiting == 0:
        ours.close()
        rank = os.posix_spawn("/bin/sleep", ["sleep", "5"], {}, setpgroup=0)
        _wait(theirs, rank, stranger)
    theirs.close()
    ours.sendall(bytes([signal.SIGTERM]))
    assert ours.recv(1) == bytes([128 + signal.SIGTERM])
    ours.close()
    os.waitpid(waiting, 0)
