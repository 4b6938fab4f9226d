"""Runs commands inside the hosts of running jobs, and inside new containers of images.

They have this process's standard streams, and a terminal if these are one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import struct
import subprocess
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import docker
import docker.errors

from shoal import docker_client
from shoal.docker_client import containers
from shoal.errors import DockerError, UsageError, did_you_mean
from shoal.jobs import gpus, processes
from shoal.jobs.hosts.docker_objects import find_containers
from shoal.jobs.job import LOCAL
from shoal.jobs.store import KnownJob, list_host_trees
from shoal.jobs.volumes import Volume

SHELL = ["sh", "-c", "command -v bash >/dev/null && exec bash || exec sh"]
"""Starts bash, or sh in an image without it."""
_CODE = "/opt/ml/code"
_WAIT = ["sleep", "infinity"]


def run_in_host(found: KnownJob, host: str | None, command: Sequence[str]) -> int:
    """Runs a command in a host of a running job, in the directory of the code, and returns its exit code.

    Without Docker it gets the variables of the host's `train`.

    Args:
        host: The name of the host; None: the first one.

    Raises:
        UsageError: If the job has no such host.
        DockerError: If the host does not run, or Docker does not answer.
    """
    if found.record.request.engine == LOCAL:
        return _run_in_local_host(found, host, command)
    names = found.record.request.host_names
    name = choose_host(found.name, host, names)
    client = docker_client.connect(timeout=None)
    problem = f"{found.name}: the host {name} does not run"
    fix = f"Fix: try again when it has started, or choose another with --host ({', '.join(names)})"
    container = find_containers(client, found.identity, [name]).get(name)
    if container is None:
        raise DockerError(f"{problem}. {fix}")
    try:
        return run_in_container(client, str(container.id), command, _CODE)
    except docker.errors.APIError as error:
        if error.status_code not in (404, 409):  # missing, not running
            raise
        raise DockerError(f"{problem}: {error.explanation}. {fix}") from error


def choose_host(job: str, host: str | None, names: Sequence[str]) -> str:
    """Returns a host of a job by name, by default the first. Raises `UsageError` if there is no such host."""
    if host is None:
        return names[0]
    if host not in names:
        raise UsageError(
            f"--host {host}: {job} has no such host.{did_you_mean(host, names)} Fix: use one of {', '.join(names)}"
        )
    return host


def _run_in_local_host(found: KnownJob, host: str | None, command: Sequence[str]) -> int:
    """Runs a command in the directory of a host's code, with the variables of its `train`. Ctrl-C is for the command.

    Returns its exit code; 128 + N after signal N. Raises `DockerError` if the host has no process.
    """
    trees = {tree.name: tree for tree in list_host_trees(found.directory)}
    if not trees:
        raise DockerError(f"{found.name}: no host has started. Fix: try again")
    tree = trees[choose_host(found.name, host, list(trees))]
    found_processes = processes.list_descendants(tree, found.record.pid)
    if not found_processes:
        raise DockerError(f"{found.name}: {tree.name} has no process. Fix: try again when the host has started")
    environment = processes.read_environment(found_processes[0])
    process = subprocess.Popen(command, cwd=tree / "code", env=environment)
    earlier = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command, such as a debugger
    try:
        code = process.wait()
    finally:
        signal.signal(signal.SIGINT, earlier)
    return 128 - code if code < 0 else code


def open_shell(image: str, volumes: Sequence[Volume]) -> int:
    """Starts a shell in a new container of an image, which is removed at the end, and returns the shell's exit code.

    Raises `DockerError` if Docker does not have the image.
    """
    client = docker_client.connect(timeout=None)
    label = containers.unique_name("shell")
    settings = {
        "entrypoint": _WAIT[:1],
        "init": True,
        "labels": {containers.JOB_LABEL: label},
        "mounts": [mount for volume in volumes for mount in volume.to_mounts()],
        "device_requests": gpus.device_requests((gpus.ALL,)) if docker_client.has_gpus(client) else [],
    }
    with containers.remove_at_end(client, label):
        container = containers.create_container(client, image, _WAIT[1:], settings)
        container.start()
        return run_in_container(client, str(container.id), SHELL)


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
