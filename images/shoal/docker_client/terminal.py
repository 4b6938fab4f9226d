"""Runs a command in a container with this process's standard streams, with a terminal if these are one."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import struct
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import docker
import docker.errors

from shoal.docker_client import containers

_CHUNK = 1 << 16
_HEADER = struct.Struct(">BxxxL")
"""The stream and the length of a frame, with which Docker separates standard output from standard error."""
_STDIN, _STDOUT = 0, 1


def has_terminal() -> bool:
    """Returns whether standard input and output are a terminal."""
    return os.isatty(_STDIN) and os.isatty(_STDOUT)


def run_in_container(
    client: docker.DockerClient, container_id: str, command: Sequence[str], directory: str | None = None
) -> int:
    """Runs a command in a container that runs, and returns its exit code. Starts a thread that reads standard input.

    With a terminal, the command gets one too, and keys such as Ctrl-C go to it. Otherwise standard output and error
    stay apart, and standard input is passed on if it is not a terminal.

    Args:
        client: The connection to Docker.
        container_id: The container.
        command: The program and its arguments.
        directory: The working directory; None: the image's.
    """
    api, interactive = client.api, has_terminal()
    has_input = interactive or not os.isatty(_STDIN)
    variables = {"TERM": os.environ.get("TERM") or "xterm"} if interactive else {}
    settings: dict[str, Any] = {
        "stdin": has_input,
        "tty": interactive,
        "workdir": directory,
        "environment": variables,
    }
    number = str(api.exec_create(container_id, list(command), **settings)["Id"])
    with _attach(api, number, interactive) as (connection, first):
        if has_input:
            threading.Thread(target=_send_input, args=(connection,), daemon=True).start()
        if interactive:
            with _raw_terminal(lambda columns, lines: api.exec_resize(number, lines, columns)):
                _receive(connection, first, lambda chunk: _write(_STDOUT, chunk))
        else:
            _receive(connection, first, _Frames().add)
    while (state := api.exec_inspect(number))["Running"]:  # it has closed its streams before
        time.sleep(0.05)
    return int(state["ExitCode"])


@contextlib.contextmanager
def _attach(api: Any, number: str, interactive: bool) -> Iterator[tuple[socket.socket, bytes]]:
    """Yields the connection to a command's streams, and the bytes after the HTTP headers, which the SDK loses."""
    wrapper = api.exec_start(number, tty=interactive, socket=True)
    with contextlib.closing(wrapper), containers.close_at_end(wrapper):
        connection = getattr(wrapper, "_sock", wrapper)
        connection.settimeout(0)
        first = wrapper._response.raw._fp.fp.peek()
        connection.settimeout(None)
        yield connection, bytes(first)


@contextlib.contextmanager
def _raw_terminal(resize: Callable[[int, int], Any]) -> Iterator[None]:
    """Passes all keys on, and changes of the terminal's size. The terminal's settings are restored at the end."""

    def send_size(*_: object) -> None:
        """A signal handler for SIGWINCH."""
        size = shutil.get_terminal_size()
        with contextlib.suppress(docker.errors.APIError):  # the command has ended
            resize(size.columns, size.lines)

    settings = termios.tcgetattr(_STDIN)
    earlier = signal.signal(signal.SIGWINCH, send_size)
    try:
        tty.setraw(_STDIN, termios.TCSADRAIN)  # keys that were pressed early are kept
        send_size()
        yield
    finally:
        termios.tcsetattr(_STDIN, termios.TCSADRAIN, settings)
        signal.signal(signal.SIGWINCH, earlier)


def _send_input(connection: socket.socket) -> None:
    """Body of a thread: copy standard input to a connection, and close that direction at the end."""
    with contextlib.suppress(OSError):  # the command has ended, or there is no standard input
        while chunk := os.read(_STDIN, _CHUNK):
            connection.sendall(chunk)
        connection.shutdown(socket.SHUT_WR)


def _receive(connection: socket.socket, first: bytes, write: Callable[[bytes], None]) -> None:
    chunk = first or connection.recv(_CHUNK)
    while chunk:
        write(chunk)
        chunk = connection.recv(_CHUNK)


@dataclass
class _Frames:
    """Writes frames to standard output and standard error as they arrive."""

    rest: bytes = b""

    def add(self, chunk: bytes) -> None:
        self.rest += chunk
        while len(self.rest) >= _HEADER.size:
            stream, length = _HEADER.unpack_from(self.rest)
            end = _HEADER.size + length
            if len(self.rest) < end:
                return
            _write(int(stream), self.rest[_HEADER.size : end])
            self.rest = self.rest[end:]


def _write(descriptor: int, chunk: bytes) -> None:
    while chunk:
        chunk = chunk[os.write(descriptor, chunk) :]
