"""Pushes images to a registry, and retries after errors that may be temporary.

Docker pushes them as it compresses them. Another compression, or an index for lazy loading, is made and sent here.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import docker
import docker.errors
import docker.models.images
import requests
import urllib3.exceptions
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from shoal.builds import layers, registry, soci
from shoal.console import print_line
from shoal.docker_client import containers
from shoal.errors import DiskError, PushError

TRIES = 5
_SAVED_AT_ONCE = 1024 * 1024  # bytes of an image that Docker sends at once
_PREFIX = re.compile(r"[a-z0-9.-]+(:\d+)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)*")
# How registries and networks report temporary errors.
_TRANSIENT = re.compile(
    r"time(d )?out|connection (refused|reset|aborted)|closed (idle|network) connection|broken pipe|\beof\b"
    r"|temporary failure|server misbehaving|unexpected http (response )?(code|status):? 5\d\d"
    r"|\b(429|500|502|503|504)\b|too ?many ?requests|unavailable",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Format:
    """How an image is stored in a registry: compressed by Docker if `compression` is None and it is not `lazy`."""

    compression: layers.Compression | None = None
    lazy: bool = False
    """Whether it has a SOCI index, for which it is compressed with gzip."""


DOCKERS = Format()


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
    client: docker.DockerClient,
    tag: str,
    target: str,
    console: Console,
    wait: Callable[[float], object] = time.sleep,
    stored: Format = DOCKERS,
) -> Pushed:
    """Pushes the image `tag` as `target`, with the credentials that `docker login` has stored.

    If Docker pushes it, the image has the tag `target` meanwhile. If not, its compressed layers are in a temporary
    directory. Temporary errors are retried after 1, 2, 4 and 8 seconds, for which `wait` is called.

    Raises:
        PushError: With the registry's words, or if Docker goes away or lacks the image.
        DiskError: If the temporary directory has no place for the layers.
    """
    started = time.monotonic()
    prepare = _tagged if stored == DOCKERS else _packed
    with _report_lost_docker(target), prepare(client, tag, target, stored) as send:
        for tries in range(1, TRIES + 1):
            try:
                digest = send(console)
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


Send = Callable[[Console], str]
"""Sends an image once, and returns its digest. Raises PushError if the registry or Docker reports an error."""


@contextmanager
def _tagged(client: docker.DockerClient, tag: str, target: str, _: Format) -> Iterator[Send]:
    """A tag that the image had before stays. Another image that has this tag loses it."""
    image = _find(client, tag)
    is_new = re.sub(rf"^(index\.)?{registry.HUB}/(library/)?", "", target) not in image.tags  # as Docker lists them
    try:
        with containers.delay_interrupts():
            image.tag(target)
        yield lambda console: _try(client, target, console)
    finally:
        if is_new:
            with containers.delay_interrupts(), suppress(docker.errors.ImageNotFound):  # Docker did not tag it
                client.images.remove(target)


@contextmanager
def _packed(client: docker.DockerClient, tag: str, target: str, stored: Format) -> Iterator[Send]:
    """Compresses the image into a temporary directory. Each try sends only blobs that the registry lacks."""
    image = _find(client, tag)
    with tempfile.TemporaryDirectory(prefix="shoal-push-") as name:
        size, free = image.attrs["Size"], shutil.disk_usage(name).free
        if free < size:
            raise DiskError(
                f"{name}: {free / 1e9:.1f} GB free, and the layers of {tag} may need {size / 1e9:.1f} GB. Fix: free"
                " some, or set TMPDIR to a directory on another disk"
            )
        chunks = image.save(chunk_size=_SAVED_AT_ONCE)
        packed = layers.pack_image(tag, chunks, Path(name), stored.compression or "gzip", with_entries=stored.lazy)
        publication = soci.publish_lazy(packed) if stored.lazy else soci.publish_plain(packed)
        yield lambda console: _send(publication, target, console)


def _find(client: docker.DockerClient, tag: str) -> docker.models.images.Image:
    try:
        return client.images.get(tag)
    except docker.errors.ImageNotFound:
        raise PushError(f"{tag}: Docker does not have it. Fix: shoal build {tag}") from None


def _send(publication: soci.Publication, target: str, console: Console) -> str:
    """Sends the blobs and manifests that the registry lacks, and returns the digest of the one with the tag."""
    place = registry.Registry(target)
    with _progress(console) as progress:
        task = progress.add_task(target, total=sum(blob.size for blob in publication.blobs))
        for blob in publication.blobs:
            place.send_blob(blob, lambda count: progress.advance(task, count))
    for manifest in publication.manifests:
        place.send_manifest(manifest, by_tag=False)
    return place.send_manifest(publication.tagged, by_tag=True)


def _progress(console: Console) -> Progress:
    columns = TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _try(client: docker.DockerClient, target: str, console: Console) -> str:
    """Pushes once, and returns the manifest's digest. Raises PushError if the registry or Docker reports an error."""
    digest = ""
    with _progress(console) as progress:
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
