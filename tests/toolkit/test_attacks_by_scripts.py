"""Attacks by a script on the `train` that runs it."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from unittest.mock import Mock

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal_toolkit.output.pipes import FlowControl
from shoal_toolkit.plan import rank_shell
from shoal_toolkit.run.ranks import LocalRanks
from shoal_toolkit.system.loop import Loop
from shoal_toolkit.system.ports import find_free_port

NO_REPORTS = (
    *(b"", b"\xff", b"start", b"end 1", b"end 0 -1", b"start 0 0 1 1 1", b"x 0 0", b"end 0 0x1", b" end 0 1"),
    b"start 0 0 " + b"9" * 400,
    b"end 0 " + b"1" * 300_000,
)


def read_reports(directory: Path, lines: bytes) -> Mock:
    """Have a script write to the FIFO of its rank's shell, between the reports of the shell."""
    loop, events = Loop(), Mock()
    ranks = LocalRanks(loop, FlowControl(), str(directory), 0, events)
    writer = os.open(directory / rank_shell.EVENTS, os.O_WRONLY)
    for start in range(0, len(lines), 60_000):
        os.write(writer, lines[start : start + 60_000])
        ranks.read_reports()
    os.write(writer, b"\nend 7 3\n")
    os.close(writer)
    ranks.finish()
    loop.close()
    return events


def test_what_a_script_writes_between_reports_of_ranks_is_ignored(tmp_path: Path) -> None:
    """It ended `train` with a traceback, and a success became a failure."""
    events = read_reports(tmp_path, b"\n".join((b"start 7 0 999999999", *NO_REPORTS)))
    events.on_rank_started.assert_called_once_with(7)
    events.on_rank_ended.assert_called_once_with(7, 3)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50, deadline=None)
@given(st.binary(max_size=200))
def test_no_report_ends_train(tmp_path: Path, lines: bytes) -> None:
    events = read_reports(tmp_path, lines)
    (tmp_path / rank_shell.EVENTS).unlink()
    assert events.on_rank_ended.call_args.args == (7, 3)


def test_a_stranger_with_the_reservation_of_the_default_port_delays_no_job() -> None:
    """Anybody on the machine can take the name of an abstract socket."""
    with socket.socket(socket.AF_UNIX) as taken, socket.create_server(("127.0.0.1", 0)) as probe:
        default = probe.getsockname()[1]
        probe.close()
        taken.bind(f"\0shoal-master-port-{default}")
        assert find_free_port(str(default)) != str(default)
    assert find_free_port(str(default)) == str(default)
