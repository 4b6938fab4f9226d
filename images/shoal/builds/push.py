"""Pushes images to a registry, and tries again where another try can help."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

import docker
import docker.errors
import requests
import urllib3.exceptions
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from shoal.docker_client import containers
from shoal.errors import PushError

TRIES = 5
_PREFIX = re.compile(r"[a-z0-9.-]+(:\d+)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)*")
# What registries, and networks on the way there, say when they may do better a moment later.
_TRANSIENT = re.compile(
    r"time(d )?out|connection (refused|reset)|closed (idle|network) connection|broken pipe|\beof\b"
    r"|temporary failure|server misbehaving|unexpected http (response )?(code|status):? 5\d\d"
    r"|\b(429|500|502|503|504)\b|too ?many ?requests|unavailable",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Pushed:
    """How the push of an image ended. `tries`: how many it took; a failure has its `error` in place of both last."""

    tag: str
    reference: str
    state: Literal["pushed", "failed"]
    seconds: float
    digest: str | None = None
    tries: int | None = None
    error: Exception | None = None


def reference(tag: str, prefix: str) -> str:
    """Return what an image is called in a registry: `prefix` is its host, and what stands before the repository.

    Raises PushError for a prefix that cannot be one.
    """
    if not _PREFIX.fullmatch(prefix):
        raise PushError(
            f"--to {prefix}: expected a registry's host, and what stands before the image's name there, in small"
            " letters: registry.example.org/team or localhost:5000"
        )
    return f"{prefix}/{tag}"


def push(
    client: docker.DockerClient, tag: str, target: str, console: Console, wait: Callable[[float], object] = time.sleep
) -> Pushed:
    """Push the engine's image `tag` as `target`, with the credentials that `docker login` has stored.

    What the network or the registry may do better a moment later is tried again, with 1, 2, 4, 8 seconds between; all
    else is not. Raises PushError with the registry's words, or that the engine went away.
    """
    started = time.monotonic()
    with _engine_there(target), _named(client, tag, target):
        for tries in range(1, TRIES + 1):
            try:
                digest = _try(client, target, console)
            except PushError as error:
                if tries == TRIES or not _TRANSIENT.search(str(error)):
                    raise PushError(f"{target}: {error}{_advice(str(error), tries)}") from None
                console.print(f"{target}: {error}; trying again", markup=False, highlight=False, soft_wrap=True)
                wait(2.0 ** (tries - 1))
            else:
                return Pushed(tag, target, "pushed", round(time.monotonic() - started, 3), digest, tries)
    raise AssertionError("the last try returns or raises")


@contextmanager
def _engine_there(target: str) -> Iterator[None]:
    """Say what it means where the engine's answer breaks off, or none comes: the SDK hands on what is below it."""
    try:
        yield
    except docker.errors.APIError:  # it answers
        raise
    except (requests.RequestException, urllib3.exceptions.HTTPError, docker.errors.StreamParseError) as error:
        raise PushError(
            f"{target}: the engine went away during the push: {error}. What to do: see that it runs (shoal doctor),"
            " and push again; what the registry has already is not sent twice"
        ) from error


@contextmanager
def _named(client: docker.DockerClient, tag: str, target: str) -> Iterator[None]:
    """Give the image that name, for as long as it is pushed."""
    try:
        image = client.images.get(tag)
    except docker.errors.ImageNotFound:
        raise PushError(f"{tag}: not on the engine. Build it first: shoal build {tag}") from None
    is_new = target not in image.tags
    try:
        with containers.uninterrupted():
            image.tag(target)
        yield
    finally:
        if is_new:
            with containers.uninterrupted(), suppress(docker.errors.ImageNotFound):  # the engine did not take it
                client.images.remove(target)


def _try(client: docker.DockerClient, target: str, console: Console) -> str:
    """Push once; return the manifest's digest."""
    digest = ""
    with _bar(console) as progress:
        task = progress.add_task(target, total=None)
        layers: dict[str, Mapping[str, int]] = {}
        for line in _lines(client, target):
            if "error" in line:
                raise PushError(str(line["error"]).strip())
            if detail := line.get("progressDetail"):
                layers[line["id"]] = detail
                completed, total = _sums(layers.values())
                progress.update(task, completed=completed, total=total)
            digest = line.get("aux", {}).get("Digest", digest)
    if not digest:
        raise PushError("the engine ended the push without an error and without a digest")
    return digest


def _lines(client: docker.DockerClient, target: str) -> Iterable[dict[str, Any]]:
    lines: Iterable[dict[str, Any]] = client.api.push(target, stream=True, decode=True)
    return lines


def _sums(layers: Iterable[Mapping[str, int]]) -> tuple[int, int]:
    known = [(layer.get("current", 0), layer["total"]) for layer in layers if "total" in layer]
    return sum(min(current, total) for current, total in known), sum(total for _, total in known)


def _bar(console: Console) -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _advice(error: str, tries: int) -> str:
    if re.search(r"unauthorized|authentication|credentials|denied|forbidden", error, re.IGNORECASE):
        return ". What to do: docker login to the registry, with an account that may push there"
    return f" (tried {tries} times)" if tries > 1 else ""
