"""Builds one image: sources → context → engine → image, skipping what is up to date."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import IO, Any

import docker
import docker.errors
import docker.models.images
import requests
from rich.console import Console

from shoal import base, buildkit, classic, context, engine, machine
from shoal.errors import BuildError, DiskError
from shoal.progress import BuildProgress, one_line
from shoal.project import Project
from shoal.spec import BuildSpec, ImageSpec

FINGERPRINT_LABEL = "shoal.fingerprint"


@dataclass(frozen=True)
class Built:
    """An image on the engine: its tag and ID, whether it was `up_to_date` already, and the seconds that it took."""

    tag: str
    image_id: str
    up_to_date: bool
    seconds: float


def build(project: Project, spec: BuildSpec, image: ImageSpec, console: Console) -> Built:
    """Bring the image on the engine up to date.

    Raises `BuildError` with the failing step and its last lines, and `EngineError`, `DiskError`, `SpecError`,
    `BaseImageError`. An interrupt closes the connection, which makes the engine stop the build and drop what it held.
    """
    started = time.monotonic()
    client = engine.connect()
    has_buildkit = engine.has_buildkit(client)
    sources = context.gather(project, spec, image, buildkit=has_buildkit)

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    base_image = base.ensure(client, machine.read, project.cache, say)
    fingerprint = sources.fingerprint(base_image.image_id)
    present = find(client, image.tag)
    if present is not None and present.labels.get(FINGERPRINT_LABEL) == fingerprint:
        return Built(image.tag, str(present.id), True, time.monotonic() - started)
    if present is None:
        engine.check_disk(client, image.disk_gib)
    host = machine.read()
    options = {
        "t": image.tag,
        "version": "2" if has_buildkit else "1",
        "rm": "1",
        "forcerm": "1",
        "buildargs": json.dumps({"BASE": base_image.reference, **dict(host.proxies)}),
        "labels": json.dumps({FINGERPRINT_LABEL: fingerprint, "org.opencontainers.image.base.name": base_image.origin}),
    }
    log = project.cache / "logs" / f"{image.directory}.log"
    with TemporaryFile() as archive, BuildProgress(image.tag, log, console) as progress:
        for words in host.left_out:
            progress.note(f"not used in builds: {words}")
        context.write_tar(context.files(sources, spec, image, host), archive)
        archive.seek(0)
        _run(client, archive, options, progress)
    if progress.failure or progress.failed_step:
        raise _failure(image.tag, progress, str(log))
    result = client.images.get(image.tag)
    if result.labels.get(FINGERPRINT_LABEL) != fingerprint:
        raise BuildError(f"{image.tag}: the engine ended the build without an error and without the image. Log: {log}")
    if present is not None and present.id != result.id:
        _remove_replaced(client, str(present.id))
    return Built(image.tag, str(result.id), False, time.monotonic() - started)


def find(client: docker.DockerClient, tag: str) -> docker.models.images.Image | None:
    """Return the engine's image of that tag, or None."""
    try:
        return client.images.get(tag)
    except docker.errors.ImageNotFound:
        return None


def _remove_replaced(client: docker.DockerClient, image_id: str) -> None:
    """Remove the image that lost its tag to a new one, unless another tag or a container still holds it."""
    try:
        if not client.images.get(image_id).tags:
            client.images.remove(image_id)
    except docker.errors.ImageNotFound:
        return
    except docker.errors.APIError as error:
        if error.status_code != requests.codes.conflict:
            raise


def _run(client: docker.DockerClient, archive: IO[bytes], options: Mapping[str, str], progress: BuildProgress) -> None:
    """Send the context and show the answer. The SDK's own `build` has no way to ask for BuildKit or to hang up."""
    api = client.api
    url = f"{api.base_url}/v{api.api_version}/build"
    headers = {"Content-Type": "application/x-tar"}
    translate = buildkit.events if options["version"] == "2" else classic.events
    with api.post(url, params=options, data=archive, headers=headers, stream=True) as response:
        if response.status_code != requests.codes.ok:
            raise BuildError(f"{options['t']}: the engine refused the build: {response.text.strip()}")
        for event in translate(_json_lines(response)):
            progress.show(event)


def _json_lines(response: requests.Response) -> Iterator[Mapping[str, Any]]:
    # chunk_size=None hands over each chunk as it comes; the engine ends each object with a line end.
    rest = b""
    for chunk in response.iter_content(chunk_size=None):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (json.loads(line) for line in lines if line.strip())
    if rest.strip():
        yield json.loads(rest)


def _failure(tag: str, progress: BuildProgress, log: str) -> BuildError | DiskError:
    step = progress.failed_step
    lines = [f"{tag}: the build failed"]
    if step:
        lines = [f"{tag}: step {step.number}/{step.total} failed: {one_line(step.command, 400)}"]
        lines += [f"    {line}" for line in progress.tail]
    message = progress.failure or (step.error if step else "")
    lines += [message.strip(), f"The whole log: {log}"]
    text = "\n".join(lines)
    return DiskError(f"{text}\nThe disk is full.") if "no space left on device" in text.lower() else BuildError(text)
