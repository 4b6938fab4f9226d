"""Containers of ours: named, labelled, and removed with their networks at the end, however it ends."""

from __future__ import annotations

import contextlib
import secrets
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any

import docker
import docker.errors
from docker.models.containers import Container
from docker.models.networks import Network

from shoal.errors import DockerError

JOB_LABEL = "shoal.job"
HANGS = 10
"""Seconds after which an engine that has not answered is taken for one that hangs."""


def unique(stem: str) -> str:
    """Return a name that begins like this and that nothing else has."""
    return f"{stem}-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Let an interrupt wait until this is done, a second or two; one that comes when another has waited long does not.

    A removal must not end half way. And what the engine is asked to make, it makes, also when nobody waits for the
    answer any more: it is there to be removed only after that.
    """
    if threading.current_thread() is not threading.main_thread():  # which alone hears them
        yield
        return
    came: list[int] = []
    first = 0.0
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def wait(number: int, _: object) -> None:
        nonlocal first
        first = first or time.monotonic()
        came.append(number)
        if time.monotonic() - first > HANGS:
            restore()
            signal.raise_signal(came.pop())

    def restore() -> None:
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
        for heard in came[:1]:
            signal.raise_signal(heard)


@contextlib.contextmanager
def removing(client: docker.DockerClient, name: str) -> Iterator[None]:
    """Remove all containers and networks of the job at the end: by label, so those half made are found too."""
    try:
        yield
    finally:
        with uninterrupted():
            for container in client.containers.list(all=True, filters={"label": f"{JOB_LABEL}={name}"}):
                with contextlib.suppress(docker.errors.NotFound):
                    container.remove(force=True, v=True)
            for network in client.networks.list(filters={"label": f"{JOB_LABEL}={name}"}):
                _remove(network)


def _remove(network: Network) -> None:
    """Remove a network. Containers of others that are attached to it, such as one that watches it, are detached."""
    network.reload()
    for container in network.attrs["Containers"] or ():
        with contextlib.suppress(docker.errors.NotFound):  # it has ended meanwhile
            network.disconnect(container, force=True)
    network.remove()


def create(client: docker.DockerClient, image: str, command: list[str], settings: dict[str, Any]) -> Container:
    """Create (not start) a container. Raises `DockerError` when the engine does not have the image."""
    try:
        with uninterrupted():
            return client.containers.create(image, command, **settings)
    except docker.errors.ImageNotFound as error:
        raise DockerError(f"the engine has no image {image}. Build or pull it; `shoal list` names ours.") from error


def shown(text: str) -> str:
    """Return a text of an image without what a terminal obeys; ends of lines stay."""
    return "".join(char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in text)


def lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """Yield whole lines; a progress bar's \\r ends one too."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        yield from (line.decode(errors="replace") for line in lines)
    if rest:
        yield rest.decode(errors="replace")
