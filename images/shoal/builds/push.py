"""Pushes images to a registry, and retries after errors that may be temporary."""

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

from shoal.console import print_line
from shoal.docker_client import containers
from shoal.errors import PushError

TRIES = 5
_PREFIX = re.compile(r"[a-z0-9.-]+(:\d+)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)*")
# How registries and networks report temporary errors.
_TRANSIENT = re.compile(
    r"time(d )?out|connection (refused|reset)|closed (idle|network) connection|broken pipe|\beof\b"
    r"|temporary failure|server misbehaving|unexpected http (response )?(code|status):? 5\d\d"
    r"|\b(429|500|502|503|504)\b|too ?many ?requests|unavailable",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Pushed:
    """How the push of an image ended: a success with `digest` and the number of `tries`, or a failure with `error`."""

    tag: str
    reference: str
    state: Literal["pushed", "failed"]
    seconds: float
    digest: str | None = None
    tries: int | None = None
    error: Exception | None = None


def make_reference(tag: str, prefix: str) -> str:
    """Returns an image's name in a registry. Raises PushError if the prefix is not valid.

    Args:
        prefix: The registry's host, and any path before the repository.
    """
    if not _PREFIX.fullmatch(prefix):
        raise PushError(
            f"--to {prefix}: expected a registry's host, with an optional path, in lower case. Fix: such as"
            " registry.example.org/team or localhost:5000"
        )
    return f"{prefix}/{tag}"


def push_image(
    client: docker.DockerClient, tag: str, target: str, console: Console, wait: Callable[[float], object] = time.sleep
) -> Pushed:
    """Pushes the image `tag` as `target`, with the credentials that `docker login` has stored.

    The image has the tag `target` meanwhile. Temporary errors are retried after 1, 2, 4 and 8 seconds, for which `wait`
    is called.

    Raises:
        PushError: With the registry's words, or if Docker goes away or lacks the image.
    """
    started = time.monotonic()
    with _report_lost_docker(target), _tagged(client, tag, target):
        for tries in range(1, TRIES + 1):
            try:
                digest = _try(client, target, console)
            except PushError as error:
                if tries == TRIES or not _TRANSIENT.search(str(error)):
                    raise PushError(f"{target}: {error}{_advice(str(error), tries)}") from None
                print_line(f"{target}: {error}; trying again", console)
                wait(2.0 ** (tries - 1))
            else:
                return Pushed(tag, target, "pushed", round(time.monotonic() - started, 3), digest, tries)
    raise AssertionError("the last try returns or raises")


@contextmanager
def _report_lost_docker(target: str) -> Iterator[None]:
    """Raises PushError if Docker's answer breaks off or none comes. The SDK raises errors of several libraries then."""
    try:
        yield
    except docker.errors.APIError:  # Docker answers
        raise
    except (requests.RequestException, urllib3.exceptions.HTTPError, docker.errors.StreamParseError) as error:
        raise PushError(
            f"{target}: Docker went away during the push: {error}. Fix: see that it runs (shoal doctor),"
            " and push again; layers that the registry has already are not sent again"
        ) from error


@contextmanager
def _tagged(client: docker.DockerClient, tag: str, target: str) -> Iterator[None]:
    """A tag that the image had before stays. Another image that has this tag loses it."""
    try:
        image = client.images.get(tag)
    except docker.errors.ImageNotFound:
        raise PushError(f"{tag}: Docker does not have it. Fix: shoal build {tag}") from None
    is_new = target not in image.tags
    try:
        with containers.delay_interrupts():
            image.tag(target)
        yield
    finally:
        if is_new:
            with containers.delay_interrupts(), suppress(docker.errors.ImageNotFound):  # Docker did not tag it
                client.images.remove(target)


def _try(client: docker.DockerClient, target: str, console: Console) -> str:
    """Pushes once, and returns the manifest's digest. Raises PushError if the registry or Docker reports an error."""
    digest = ""
    columns = TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(target, total=None)
        layers: dict[str, Mapping[str, int]] = {}
        lines: Iterable[dict[str, Any]] = client.api.push(target, stream=True, decode=True)
        for line in lines:
            if "error" in line:
                raise PushError(str(line["error"]).strip())
            if detail := line.get("progressDetail"):
                layers[line["id"]] = detail
                completed, total = _sums(layers.values())
                progress.update(task, completed=completed, total=total)
            digest = line.get("aux", {}).get("Digest", digest)
    if not digest:
        raise PushError("Docker ended the push without an error and without a digest. Fix: push again")
    return digest


def _sums(layers: Iterable[Mapping[str, int]]) -> tuple[int, int]:
    """Returns the sums of sent and of all bytes, of the layers with a known size."""
    known = [(layer.get("current", 0), layer["total"]) for layer in layers if "total" in layer]
    return sum(min(current, total) for current, total in known), sum(total for _, total in known)


def _advice(error: str, tries: int) -> str:
    if re.search(r"unauthorized|authentication|credentials|denied|forbidden", error, re.IGNORECASE):
        return ". Fix: docker login to the registry, with an account that may push there"
    return f" (tried {tries} times). Fix: see whether the registry answers, and push again" if tries > 1 else ""
