"""Builds images: sources → context → engine → image, parents first, skipping what is up to date."""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, Literal

import docker
import docker.errors
import docker.models.images
import requests
from docker.types import CancellableStream
from rich.console import Console
from rich.progress import Progress

from shoal import docker_client
from shoal.builds import base, buildkit, bundled, debianlock, graph, labels
from shoal.builds.progress import BuildProgress, screen
from shoal.docker_client import archive
from shoal.docker_client.images import find, remove_replaced
from shoal.errors import BuildError, DiskError
from shoal.matrix.project import Project
from shoal.matrix.spec import BuildSpec, ImageSpec, System
from shoal.network.settings import NetworkSettings, read_network_settings
from shoal.sources import context, debian, provenance
from shoal.sources.context import Sources
from shoal.sources.record import Plan, make_plan
from shoal.sources.steps import one_line


@dataclass(frozen=True)
class Built:
    """An image on the engine: its ID, and whether it was `up_to_date` already."""

    image_id: str
    up_to_date: bool


@dataclass(frozen=True)
class Ending:
    """How the build of an image ended. One that was not tried took no `seconds`; only one that is there has an ID."""

    tag: str
    state: Literal["built", "up to date", "failed", "not tried"]
    seconds: float | None = None
    image_id: str | None = None
    error: Exception | None = None


@dataclass(frozen=True)
class Site:
    """What the builds of a command share; `bases` are by system, `sources` by tag."""

    project: Project
    spec: BuildSpec
    bases: Mapping[System, base.BaseImage]
    sources: Mapping[str, Sources]
    live: Progress
    streams: Streams
    host: Callable[[], NetworkSettings]
    network: str
    provenance: Callable[[], provenance.Provenance]


class Streams:
    """The engine's answers that are being read. Closing a build's makes the engine stop it and drop what it held."""

    def __init__(self) -> None:
        self._open: set[CancellableStream[bytes]] = set()
        self._stopped = False

    @contextlib.contextmanager
    def reading(self, response: requests.Response) -> Iterator[None]:
        """Read the response, unless all are stopped already."""
        stream: CancellableStream[bytes] = CancellableStream(iter(()), response)
        self._open.add(stream)
        try:
            if self._stopped:
                raise BuildError("stopped")
            yield
        finally:
            self._open.discard(stream)

    def stop(self) -> None:
        self._stopped = True
        for stream in tuple(self._open):
            # It ended meanwhile, or is an SSH channel, which closes with this process.
            with contextlib.suppress(OSError, docker.errors.DockerException):
                stream.close()


def build_all(
    project: Project,
    spec: BuildSpec,
    images: Iterable[ImageSpec],
    console: Console,
    jobs: int,
    bundle: Path | None = None,
    bundle_digest: str | None = None,
) -> list[Ending]:
    """Bring the images and those that they extend up to date, up to `jobs` at once. Returns how each ended.

    `bundle` is a directory that `shoal bundle` has filled: builds then take all from it, with the network off, once its
    files are those that it was made with. `bundle_digest`: what `shoal bundle` printed.

    Raises what concerns all of them before any is built: `DockerError`, `SpecError`, `BaseImageError`, `BundleError`,
    and `BuildError` for a module of ours that is not Python. An interrupt stops the builds.
    """
    wanted = {image.tag: image for image in spec.with_parents(images)}
    client = docker_client.connect()
    docker_client.check_buildkit(client)
    sources = _gather(project, spec, wanted.values())

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    systems = dict.fromkeys(image.system for image in wanted.values())
    if bundle:
        digest = bundled.check(bundle, bundle_digest)
        hint = "" if bundle_digest else ". Compare it with what `shoal bundle` printed, or let --bundle-digest do that"
        say(f"bundle: {bundle}, digest sha256:{digest}{hint}")
        bundled.load_bases(client, bundle, systems)
    host = functools.cache(functools.partial(bundled.read, bundle)) if bundle else read_network_settings
    locks = {system: debian.read(project, system.suite) for system in systems}
    bases = {
        system: base.ensure(client, system, host, project.cache, say, pin=lock.bases.get(system.upstream, ""))
        for system, lock in locks.items()
    }
    for system in systems if not bundle else ():  # whose files have been checked
        for words in debianlock.differences(client, bases[system], system, locks[system]):
            say(f"! {words}")
    seconds: dict[str, float] = {}

    def timed(tag: str) -> Built:
        started = time.monotonic()
        try:
            return build(site, wanted[tag])
        finally:
            seconds[tag] = round(time.monotonic() - started, 3)

    with screen(console, wanted) as live:
        network = "none" if bundle else "default"
        origin = functools.cache(functools.partial(provenance.read, project))
        site = Site(project, spec, bases, sources, live, Streams(), host, network, origin)
        below = {image.tag: image.extends for image in _in_turn(wanted.values())}
        results = graph.run(below, timed, site.streams.stop, jobs)
    return [_ending(tag, results[tag], seconds.get(tag)) for tag in wanted]


def _in_turn(images: Iterable[ImageSpec]) -> list[ImageSpec]:
    """Return images in the order in which builds take least time together: the largest first, so that no long one is
    left for the end, but variants last. One has most steps of its runtime image: beside it, it would wait for these.
    """
    return sorted(images, key=lambda image: (image.variant != "runtime", -image.disk_gib))


def build(site: Site, image: ImageSpec) -> Built:
    """Bring one image up to date on the engine; what it extends is there.

    Raises `BuildError` with the failing step and its last lines, and `DockerError`, `DiskError`.
    """
    client = docker_client.connect()  # one a thread
    beneath = _parent(client, image.extends) if image.extends else site.bases[image.system]
    sources = site.sources[image.tag]
    record = sources.record(beneath.identity)
    present = find(client, image.tag)
    if present is not None and record.is_of(present.labels):
        return Built(str(present.id), up_to_date=True)
    if present is None:
        docker_client.check_disk(client, image.disk_gib)
    host = site.host()
    inherited = client.images.get(beneath.reference).labels
    options = {
        "t": image.tag,
        "version": "2",  # BuildKit
        "rm": "1",
        "forcerm": "1",
        "buildargs": json.dumps({"BASE": beneath.reference, **dict(host.proxies)}),
        "networkmode": site.network,
        "labels": json.dumps({**record.labels(), **labels.oci(beneath, inherited, site.provenance())}),
    }
    log = site.project.cache / "logs" / f"{image.directory}.log"
    with TemporaryFile() as files, BuildProgress(image.tag, log, site.live) as progress:
        for words in host.left_out:
            progress.note(f"not used in builds: {words}")
        archive.write(sources.files(site.spec, host), files)
        files.seek(0)
        _run(client, files, options, progress, site.streams)
    if progress.not_locked:
        words = debianlock.drift(image.tag, image.system, progress.not_locked)
        site.live.console.print(f"! {words}", markup=False, highlight=False, soft_wrap=True)
    if progress.failure or progress.failed_step:
        raise _failure(image.tag, progress, str(log))
    result = find(client, image.tag)
    if result is None or not record.is_of(result.labels):
        raise BuildError(f"{image.tag}: the engine ended the build without an error and without the image. Log: {log}")
    if present is not None and present.id != result.id:
        remove_replaced(client, str(present.id))
    return Built(str(result.id), up_to_date=False)


def decisive(images: Iterable[ImageSpec], endings: Iterable[Ending]) -> dict[str, str | None]:
    """Return the IDs, by tag, that decide whether these images are up to date: theirs, and those of their bases."""
    client = docker_client.connect()
    systems = dict.fromkeys(image.system for image in images)
    bases: dict[str, str | None] = dict.fromkeys(system.upstream for system in systems)
    found = filter(None, (base.find(client, system) for system in systems))
    return bases | {one.reference: one.image_id for one in found} | {end.tag: end.image_id for end in endings}


def told(ending: Ending) -> str:
    """Return in one line how the build of an image ended."""
    if ending.state == "up to date":
        return f"✓ {ending.tag} up to date ({str(ending.image_id)[7:19]})"
    if ending.image_id:
        return f"✓ {ending.tag} {ending.state} in {ending.seconds:.1f} s ({ending.image_id[7:19]})"
    if ending.state == "not tried":
        return f"- {ending.tag} not built: {ending.error}"
    first, *_ = str(ending.error).removeprefix(f"{ending.tag}: ").splitlines() or [type(ending.error).__name__]
    return f"✗ {ending.tag} failed: {first[:160]}"


def _ending(tag: str, result: Built | Exception, seconds: float | None) -> Ending:
    if isinstance(result, Built):
        return Ending(tag, "up to date" if result.up_to_date else "built", seconds, result.image_id)
    state: Literal["failed", "not tried"] = "not tried" if isinstance(result, graph.NotTriedError) else "failed"
    return Ending(tag, state, seconds, error=result)


def _gather(project: Project, spec: BuildSpec, images: Iterable[ImageSpec]) -> dict[str, context.Sources]:
    own = functools.cache(functools.partial(context.install_own_packages, project))
    return {image.tag: context.gather(project, spec, image, own(image.python_version)) for image in images}


def _parent(client: docker.DockerClient, tag: str) -> base.BaseImage:
    image = find(client, tag)
    if image is None:
        raise BuildError(f"{tag}: not on the engine any more, and an image extends it. Build again")
    return base.BaseImage(tag, str(image.id), tag)


def plan(project: Project, spec: BuildSpec, images: Iterable[ImageSpec]) -> list[Plan]:
    """Return what `build_all` would do to each image, and raise as it does. Nothing is built, pulled or changed."""
    wanted = spec.with_parents(images)
    client = docker_client.connect()
    bases = {image.system: base.find(client, image.system) for image in wanted}
    plans: dict[str, Plan] = {}
    docker_client.check_buildkit(client)
    sources = _gather(project, spec, wanted)
    for image in wanted:
        if image.extends is None:
            found = bases[image.system]
            beneath = found.identity if found else f"{image.system.upstream} (not on the engine yet)@"
        elif plans[image.extends].state == "up to date":
            beneath = _parent(client, image.extends).identity
        else:
            beneath = f"{image.extends} (rebuilt)@"
        present = find(client, image.tag)
        record = sources[image.tag].record(beneath)
        plans[image.tag] = make_plan(image.tag, present.labels if present else None, record)
    return list(plans.values())


def _run(
    client: docker.DockerClient,
    files: IO[bytes],
    options: Mapping[str, str],
    progress: BuildProgress,
    streams: Streams,
) -> None:
    """Send the context and show the answer. The SDK's own `build` has no way to ask for BuildKit or to hang up."""
    api = client.api
    url = f"{api.base_url}/v{api.api_version}/build"
    headers = {"Content-Type": "application/x-tar"}
    with api.post(url, params=options, data=files, headers=headers, stream=True) as response:
        if response.status_code != requests.codes.ok:
            raise BuildError(f"{options['t']}: the engine refused the build: {response.text.strip()}")
        with streams.reading(response):
            for event in buildkit.events(_json_lines(response)):
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
