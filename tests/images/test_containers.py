"""Containers that are made and removed: an interrupt waits for the engine's answer, and is not lost."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from shoal.docker_client import containers


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_waits(number: signal.Signals) -> None:
    received: list[int] = []
    before = signal.signal(number, lambda number, _: received.append(number))
    try:
        with containers.delay_interrupts():
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
            assert received == []
        assert received == [number]
        os.kill(os.getpid(), number)
        assert received == [number] * 2
    finally:
        signal.signal(number, before)


def test_an_interrupt_ends_what_comes_after_the_answer() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt):
        with containers.delay_interrupts():
            os.kill(os.getpid(), signal.SIGINT)
            done.append("answered")
        done.append("went on")
    assert done == ["answered"]


def test_a_docker_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containers, "HANGS", -1)
    done = []
    with pytest.raises(KeyboardInterrupt), containers.delay_interrupts():
        os.kill(os.getpid(), signal.SIGINT)
        done.append("answered")
    assert done == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_receive_no_signal() -> None:
    done = []

    def work() -> None:
        with containers.delay_interrupts():
            done.append(1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [1]


STREAMS = """
import socketserver, sys, threading
from http.server import BaseHTTPRequestHandler
import docker
from shoal.docker_client import containers

class Engine(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(b'{"Config": {"Tty": false}}')

    def do_POST(self):
        self.send_response(101)
        self.send_header("Connection", "Upgrade")
        self.send_header("Upgrade", "tcp")
        self.end_headers()

    def address_string(self):
        return "engine"

    def log_message(self, *_):
        pass

with socketserver.ThreadingUnixStreamServer(sys.argv[1], Engine) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    client = docker.APIClient(f"unix://{sys.argv[1]}", version="1.41")
    for stream in (client.attach("c", stream=True), client.exec_start("e", stream=True)):
        with containers.close_at_end(stream) as chunks:
            assert list(chunks) == []
        del stream, chunks
    server.shutdown()
    client.close()
"""


def test_streams_are_closed_in_order(tmp_path: Path) -> None:
    """Development mode prints what Python 3.13 always prints: an error of a connection that Python itself closes."""
    program = [sys.executable, "-X", "dev", "-c", STREAMS, str(tmp_path / "socket")]
    ended = subprocess.run(program, capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")


CONNECT = """\
import grp, os, sys
from shoal import docker_client, errors
"x".encode("idna")  # before setuid: another user may not be able to read Python's files
members = sys.argv[2:]
grp.getgrgid = lambda number: grp.struct_group(["engineers", "x", number, members])
os.environ["DOCKER_HOST"] = sys.argv[1]
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
try:
    docker_client.connect()
except errors.DockerError as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as another user")
@pytest.mark.parametrize(
    ("mode", "group", "members", "words"),
    [
        (0o660, 7, [], "may not use it. Fix: as root: usermod -aG engineers nobody, and log in again"),
        (0o660, 7, ["nobody"], "yet: this session began before nobody was in the group engineers. Fix: log in again"),
        (0o660, 0, [], "Fix: use root, rootless Docker, or DOCKER_HOST with one of yours"),
        (0o600, 7, [], "Fix: use root, rootless Docker, or DOCKER_HOST with one of yours"),
        (0o666, 7, [], "No Docker Engine answers at unix:///"),
        (0o000, -1, [], "No Docker Engine answers at unix:///"),
    ],
)
def test_a_socket_that_is_not_for_this_user_is_no_missing_docker(
    mode: int, group: int, members: list[str], words: str
) -> None:
    """To install Docker would be no fix. Group -1: there is no socket."""
    with TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX) as server:
        Path(directory).chmod(0o755)
        place = Path(directory, "docker.sock")
        if group >= 0:
            server.bind(str(place))
            place.chmod(mode)
            os.chown(place, 0, group)
        command = [sys.executable, "-c", CONNECT, f"unix://{place}", *members]
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert words in text
    assert ("installs" in text) == (mode == 0o666 or group < 0)
