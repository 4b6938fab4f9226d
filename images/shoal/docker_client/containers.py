"""Containers: creates them, copies files from them, and removes them with their networks at the end, in every case.

It also delays interrupts while Docker works, and splits the text that containers print.
"""

from __future__ import annotations

import contextlib
import secrets
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import IO, Any, cast

import docker
import docker.errors
import requests
from docker.models.containers import Container
from docker.models.networks import Network
from docker.types import LogConfig

from shoal.docker_client.archive import open_stream
from shoal.errors import ImageError
from shoal.limits import MOST_LOG_LINE, MOST_PROCESSES, MOST_REPORT

JOB_LABEL = "shoal.job"
_MOST_REMOVALS = 8  # of containers at the same time
_LOG = {"max-size": "64m"}
HANGS = 10
"""Seconds without an answer after which Docker is considered to hang."""


def unique_name(stem: str) -> str:
    """Returns a unique name that begins with `stem`."""
    return f"{stem}-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


@contextlib.contextmanager
def delay_interrupts() -> Iterator[None]:
    """Holds back SIGINT, SIGTERM and SIGHUP until the body is done, which takes a second or two.

    Then the first is raised, and others are dropped. A removal must be complete. Docker also completes a request if its
    client has gone, and its result can be removed only after that. If a signal has waited for `HANGS` seconds, the next
    one is raised at once. In other threads than the main one it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():  # only that thread gets signals
        yield
        return
    came: list[int] = []
    first = 0.0
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def wait(number: int, _: object) -> None:
        """A signal handler: keeps the signal for later, or raises it at once if the first has waited too long."""
        nonlocal first
        first = first or time.monotonic()
        came.append(number)
        if time.monotonic() - first > HANGS:
            restore()
            signal.raise_signal(came.pop())

    def restore() -> None:
        """Installs the earlier signal handlers again."""
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        for number, handler in old.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    old = {number: signal.signal(number, wait) for number in numbers}
    try:
        yield
    finally:
        restore()
        for number in came[:1]:
            signal.raise_signal(number)


@contextlib.contextmanager
def remove_at_end(client: docker.DockerClient, name: str) -> Iterator[None]:
    """Removes all containers and networks with the label `JOB_LABEL=name` at the end. Interrupts wait meanwhile."""
    try:
        yield
    finally:
        with delay_interrupts():
            remove_objects(client, name)


def remove_objects(client: docker.DockerClient, name: str, volumes: bool = False) -> None:
    """Removes all containers and networks with the label `JOB_LABEL=name`, and with `volumes` also named volumes.

    The label finds half-made ones too. Running containers are killed, and their anonymous volumes are removed.
    """
    filters: dict[str, str | list[str] | bool] = {"label": f"{JOB_LABEL}={name}"}
    found = client.containers.list(all=True, filters=filters)
    with ThreadPoolExecutor(max(1, min(len(found), _MOST_REMOVALS))) as pool:
        list(pool.map(_remove_container, found))
    for network in client.networks.list(filters=filters):
        _remove_network(network)
    if volumes:
        for volume in client.volumes.list(filters=filters):
            volume.remove()


def _remove_container(container: Container) -> None:
    with contextlib.suppress(docker.errors.NotFound):
        container.remove(force=True, v=True)


def _remove_network(network: Network) -> None:
    """Removes a network. Containers that are still on it, such as a foreign monitor, are detached first."""
    network.reload()
    for container in network.attrs["Containers"] or ():
        with contextlib.suppress(docker.errors.NotFound):  # it has ended meanwhile
            network.disconnect(container, force=True)
    network.remove()


def create_container(
    client: docker.DockerClient, image: str, command: list[str], settings: dict[str, Any]
) -> Container:
    """Creates a container without starting it. Raises `ImageError` if Docker does not have the image.

    `settings` are further arguments of the SDK's `containers.create`. Interrupts are delayed meanwhile. By default,
    Docker's own copy of its output has a limit, which would fill the disk, and so have its processes.
    """
    limits = {"pids_limit": most_processes(), "log_config": LogConfig(type=LogConfig.types.JSON, config=_LOG)}
    try:
        with delay_interrupts():
            return client.containers.create(image, command, **{**limits, **settings})
    except docker.errors.ImageNotFound as error:
        raise ImageError(f"Docker has no image {image}. Fix: build or pull it; `shoal list` names ours") from error


def most_processes() -> int:
    """Returns half of the processes and threads that this machine can have. Docker may run on another machine.

    The kernel has two limits: of their numbers, and of the memory for them.
    """
    try:
        return min(int(Path("/proc/sys/kernel", name).read_text()) for name in ("pid_max", "threads-max")) // 2
    except (OSError, ValueError):
        return MOST_PROCESSES


@contextlib.contextmanager
def read_archive(container: Container, path: str) -> Iterator[IO[bytes]]:
    """Gives a directory of a container as a tar archive, which is read once, from begin to end.

    The connection is closed also if an interrupt comes in the middle. The SDK's `get_archive` leaves it open, and until
    it is closed, Docker locks the container: its removal would wait for 10 minutes, and other commands with it.

    Raises:
        docker.errors.NotFound: If the container has no such directory.
    """
    assert container.client is not None  # the SDK sets it
    api = container.client.api
    url = f"{api.base_url}/v{api.api_version}/containers/{container.id}/archive"
    headers = {"Accept-Encoding": "identity"}  # otherwise Docker compresses it
    with contextlib.closing(
        api.get(url, params={"path": path}, headers=headers, stream=True, timeout=api.timeout)
    ) as response:
        try:
            response.raise_for_status()
        except requests.HTTPError as error:
            docker.errors.create_api_error_from_http_exception(error)
        yield cast(IO[bytes], response.raw)


def read_file(container: Container, path: str) -> bytes | None:
    """Returns a file of a container; None if there is none, or it is a link or larger than `MOST_REPORT`."""
    with (
        contextlib.suppress(docker.errors.NotFound),
        read_archive(container, path) as packed,
        open_stream(packed) as files,
    ):
        entry = files.next()
        content = files.extractfile(entry) if entry and entry.isfile() and entry.size <= MOST_REPORT else None
        return content.read() if content else None
    return None


@contextlib.contextmanager
def close_at_end(stream: Any) -> Iterator[Any]:
    """Gives a stream of the SDK's `attach` or `exec_start`, and closes its connection at the end.

    The SDK never closes it. Python would do so in the wrong order, and Python 3.13 prints a traceback then.
    """
    with contextlib.closing(stream._response):
        yield stream


def split_lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """Yields whole lines as text, and the last one even if it has no end. The \\r of a progress bar ends one too."""
    return (line for line, _ in split_pieces(chunks))


def split_pieces(chunks: Iterable[bytes]) -> Iterator[tuple[str, bool]]:
    """Yields the lines of `split_lines`, each with whether a terminal would overwrite it: the \\r of a progress bar.

    A line of more than `MOST_LOG_LINE` bytes is split.
    """
    splitter = PieceSplitter()
    for chunk in chunks:
        yield from splitter.feed(chunk)
    yield from splitter.flush()


class PieceSplitter:
    """Divides one stream as `split_pieces` does.

    Args:
        errors: How bytes that are not UTF-8 are decoded, as in `bytes.decode`.
    """

    def __init__(self, errors: str = "replace") -> None:
        self.rest = bytearray()
        """The line that is not complete."""
        self._errors = errors

    def feed(self, chunk: bytes) -> Iterator[tuple[str, bool]]:
        """Yields the lines that are complete now."""
        is_same_line = not self.rest.endswith(b"\r") and b"\n" not in chunk and b"\r" not in chunk
        self.rest += chunk
        if is_same_line and len(self.rest) <= MOST_LOG_LINE:
            return  # to search all of it after each byte would take minutes
        data = bytes(self.rest)
        held = b"\r" if data.endswith(b"\r") else b""  # it may be the first half of \r\n
        *lines, last = data.removesuffix(held).replace(b"\r\n", b"\n").split(b"\n")
        for line in lines:
            yield from self._split_returns(line)
        if b"\r" in last:
            bar, _, last = last.rpartition(b"\r")
            yield from ((text, True) for text, _ in self._split_returns(bar))
        self.rest = bytearray(last + held)
        if len(self.rest) > MOST_LOG_LINE:  # without end, it would fill the memory
            yield self.rest.decode(errors=self._errors), False
            self.rest.clear()

    def flush(self) -> Iterator[tuple[str, bool]]:
        """Yields an incomplete last line."""
        if self.rest:
            yield from self._split_returns(bytes(self.rest).removesuffix(b"\r"))
            self.rest.clear()

    def _split_returns(self, line: bytes) -> Iterator[tuple[str, bool]]:
        *overwritten, last = line.split(b"\r") if b"\r" in line else [line]
        for piece in overwritten:
            yield piece.decode(errors=self._errors), True
        yield last.decode(errors=self._errors), False
