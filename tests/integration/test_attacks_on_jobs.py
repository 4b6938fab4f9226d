"""Attacks on running jobs in Docker by a user of this machine without rights."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ..repeats import in_soak
from .test_members import LAUNCHERS, STRANGER, Launcher, RunningJob, await_targets, running_job

__all__ = ["running_job"]

# Opens connections to all ports that a job may use, from before they are open until it is killed. It keeps most of them
# open, silent or with a part of a protocol, and resets others. It prints each answer.
FLOOD = r"""
import os, socket, sys, time
from collections import deque
"x".encode("idna")  # before setuid: another user may not be able to read Python's files
uid, *hosts = sys.argv[1:]
os.setuid(int(uid))
ports = [7777, 2222, 2223, 8890, 7411, *range(29500, 29503)]
words = [b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\0" + (0x3C85F7CE).to_bytes(4, "little"), bytes(8)]
kept, count = deque(), 0
while True:
    count += 1
    for host in hosts:
        for port in ports:
            try:
                connection = socket.create_connection((host, port), 0.5)
                connection.sendall(words[count % 4])
                if count % 5 == 0:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                    connection.close()
                else: kept.append((port, connection))
            except OSError: continue
    while len(kept) > 800:
        port, connection = kept.popleft()
        connection.setblocking(False)
        try: answer = connection.recv(100)
        except OSError: answer = b""
        if answer and port != 7411: print(port, answer, flush=True)
        connection.close()
    time.sleep(0.002)
"""


def _addresses(job: RunningJob) -> list[str]:
    found = []
    for container in job.containers:
        container.reload()
        (network,) = container.attrs["NetworkSettings"]["Networks"].values()
        found.append(network["IPAddress"])
    return found


@pytest.mark.parametrize("launcher", [LAUNCHERS[1], in_soak(LAUNCHERS[0])], ids=lambda launcher: launcher.name)
def test_a_flood_from_before_the_ranks_listen_is_not_read_and_does_not_end_a_job(
    launcher: Launcher, running_job: RunningJob
) -> None:
    command = [sys.executable, "-c", FLOOD, str(STRANGER), *_addresses(running_job)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as flood:
        await_targets(running_job, launcher.ports)
        (running_job.channel / "end").touch()
        running_job.containers[0].wait()
        flood.kill()  # before the job's network is removed: its addresses would be somebody else's then
        log = running_job.finish()
        assert flood.stdout
        assert flood.stdout.read() == ""
    assert running_job.process.returncode == 0, log
    assert launcher.last in log
