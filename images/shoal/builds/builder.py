"""Executes the plans of builds: plan → context → BuildKit → image. Parents come first; up-to-date images stay."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Literal

import docker
import docker.errors
import requests
from docker.types import CancellableStream
from rich.console import Console
from rich.progress import Progress

from shoal import docker_client
from shoal.builds import base_image, bundled, debian_lock, graph, plan
from shoal.builds.base_image import BaseImage, Say
from shoal.builds.plan import BuildPlan
from shoal.builds.progress import BuildProgress, make_display, read_events
from shoal.console import print_line
from shoal.docker_client import archive, containers
from shoal.docker_client.images import find_image, read_labels, remove_replaced
from shoal.errors import BuildError, DiskError
from shoal.matrix.project import Project
from shoal.matrix.spec import BuildSpec, ImageSpec, System
from shoal.network.settings import NetworkSettings, read_settings_for
from shoal.sources import provenance
from shoal.sources.steps import one_line

_COMMAND = re.compile(r'^(?:failed to solve: )?process ".*" did not', re.DOTALL)
"""The command in BuildKit's message about a step that failed."""
_STEP = re.compile(r"step \d+/\d+(?= failed: )")
"""The start of the first line about a step that failed, without its command."""


@dataclass(frozen=True)
class BuildResult:
    """How the build of an image ended. Only a build that was tried has `seconds`, only a success an `image_id`."""

    tag: str
    state: Literal["built", "up to date", "failed", "not tried"]
    seconds: float | None = None
    image_id: str | None = None
    error: Exception | None = None

    def __str__(self) -> str:
        if self.state == "up to date":
            return f"✓ {self.tag} up to date ({str(self.image_id)[7:19]})"
        if self.image_id:
            return f"✓ {self.tag} {self.state} in {self.seconds:.1f} s ({self.image_id[7:19]})"
        if self.state == "not tried":
            return f"- {self.tag} not built: {self.error}"
        first, *_ = str(self.error).removeprefix(f"{self.tag}: ").splitlines() or [type(self.error).__name__]
        step = _STEP.match(first)
        return f"✗ {self.tag} failed: {step[0] if step else first[:160]}"


@dataclass(frozen=True)
class _Session:
    """The shared state of one command's builds."""

    project: Project
    spec: BuildSpec
    display: Progress
    streams: _Streams
    read_settings: Callable[[], NetworkSettings]
    network: Literal["none", "default"]
    read_provenance: Callable[[], provenance.Provenance]

    def log_path(self, image: ImageSpec) -> Path:
        return self.project.cache / "logs" / f"{image.directory}.log"


class _Streams:
    """Docker's answers to the builds in progress. If one is closed, Docker stops that build and removes its rest."""

    def __init__(self) -> None:
        self._open: set[CancellableStream[bytes]] = set()
        self._stopped = False

    @contextlib.contextmanager
    def reading(self, response: requests.Response) -> Iterator[None]:
        stream: CancellableStream[bytes] = CancellableStream(iter(()), response)
        self._open.add(stream)
        try:
            if self._stopped:
                raise BuildError("stopped")
            yield
        finally:
            self._open.discard(stream)

    def stop_all(self) -> None:
        self._stopped = True
        for stream in tuple(self._open):
            # It ended meanwhile, or is an SSH channel, which closes with this process.
            with contextlib.suppress(OSError, docker.errors.DockerException):
                stream.close()


def build_images(
    project: Project,
    spec: BuildSpec,
    images: Iterable[ImageSpec],
    console: Console,
    jobs: int,
    bundle: Path | None = None,
    bundle_digest: str | None = None,
) -> list[BuildResult]:
    """Brings images and those that they extend up to date, and returns how each build ended. An interrupt stops all.

    A failed build is a result, and is not raised. Each build writes a log file under the cache. Missing base images are
    pulled or made, or loaded from the bundle.

    Args:
        jobs: The number of builds at once.
        bundle: A directory that `shoal bundle` filled. Its files are checked; then builds take all from it, offline.
        bundle_digest: The digest that `shoal bundle` printed.

    Raises:
        ShoalError: Before any build, if none can be done: `DockerError`, `SpecError`, `BaseImageError`, `BundleError`.
            `UsageError` if `bundle` is not a bundle. `BuildError` if a module of our packages is not Python.
    """
    say = functools.partial(print_line, on=console)
    read_settings = functools.cache(functools.partial(read_settings_for, project, say))
    if bundle:
        read_settings = functools.cache(functools.partial(bundled.read_settings, bundle))
    check_bundle = functools.cache(functools.partial(_check_bundle, bundle_digest, say))

    def provide_base(client: docker.DockerClient, system: System) -> BaseImage:
        if bundle:
            check_bundle(bundle)
            bundled.load_bases(client, bundle, [system])
        return _provide_base(client, project, system, read_settings, say, check=bundle is None)

    plans = plan.plan_builds(project, spec, images, provide_base)
    origin = functools.cache(functools.partial(provenance.read_provenance, project))
    network: Literal["none", "default"] = "none" if bundle else "default"
    with make_display(console, (each.image.tag for each in plans)) as display:
        session = _Session(project, spec, display, _Streams(), read_settings, network, origin)
        return _execute(session, plans, jobs)


def _execute(session: _Session, plans: Sequence[BuildPlan], jobs: int) -> list[BuildResult]:
    """Returns a result for each plan, in their order. Failures become results. An interrupt stops all and is raised."""
    seconds: dict[str, float] = {}
    rest = {each.image.tag: each for each in plans if not each.is_up_to_date}

    def build_timed(tag: str) -> BuildResult:
        started = time.monotonic()
        try:
            return _build(session, rest[tag])
        finally:
            seconds[tag] = round(time.monotonic() - started, 3)

    # The largest first, variants last. A variant shares most steps with its runtime image: built at the same time, it
    # would wait for them.
    images = sorted((each.image for each in rest.values()), key=lambda one: (one.variant != "runtime", -one.disk_gib))
    parents = {image.tag: image.extends for image in images}
    results: dict[str, BuildResult | Exception] = {
        each.image.tag: BuildResult(each.image.tag, "up to date", image_id=each.present_id) for each in plans
    }
    results |= graph.run_tasks(parents, build_timed, session.streams.stop_all, jobs)
    return [_finish_result(tag, result, seconds.get(tag)) for tag, result in results.items()]


def _finish_result(tag: str, result: BuildResult | Exception, seconds: float | None) -> BuildResult:
    if isinstance(result, BuildResult):
        return replace(result, seconds=seconds)
    return BuildResult(tag, "not tried" if isinstance(result, graph.NotTriedError) else "failed", seconds, error=result)


def _check_bundle(expected: str | None, say: Say, bundle: Path) -> None:
    digest = bundled.check_bundle(bundle, expected)
    hint = "" if expected else ". Compare it with what `shoal bundle` printed, or let --bundle-digest do that"
    say(f"bundle: {bundle}, digest sha256:{digest}{hint}")


def _provide_base(
    client: docker.DockerClient,
    project: Project,
    system: System,
    read_settings: Callable[[], NetworkSettings],
    say: Say,
    *,
    check: bool,
) -> BaseImage:
    """Pulls or makes the base image if Docker has none. If `check`, says where it differs from the lock."""
    lock = debian_lock.read_lock(project, system.suite)
    pin = lock.bases.get(system.upstream, "")
    found = base_image.provide_base(client, system, read_settings, project.cache, say, pin=pin)
    for words in debian_lock.describe_differences(client, found, system, lock) if check else ():
        say(f"! {words}")
    return found


def _build(session: _Session, given: BuildPlan) -> BuildResult:
    """Builds the image if it is not up to date; its parent is there. Removes the image that a new one replaces."""
    client = docker_client.connect()  # one for each thread
    todo = given.complete(client)
    image = todo.image
    if todo.is_up_to_date:  # the image that it extends was built, and is the same as before
        return BuildResult(image.tag, "up to date", image_id=todo.present_id)
    if todo.present_id is None:
        docker_client.check_disk(client, image.disk_gib)
    _run_build(session, client, todo)
    result = find_image(client, image.tag)
    if result is None or not todo.record.matches(read_labels(result)):
        raise BuildError(
            f"{image.tag}: Docker ended the build without an error or an image. Log: {session.log_path(image)}."
            " Fix: build again"
        )
    if todo.present_id not in (None, result.id):
        remove_replaced(client, str(todo.present_id))
    return BuildResult(image.tag, "built", image_id=str(result.id))


def _run_build(session: _Session, client: docker.DockerClient, todo: BuildPlan) -> None:
    """Writes a log file and shows progress. Prints a warning if Debian's packages have left their lock."""
    image, parent = todo.image, todo.parent
    assert parent
    settings = session.read_settings()
    log = session.log_path(image)
    with TemporaryFile() as files, BuildProgress(image.tag, log, session.display) as progress:
        for words in settings.left_out:
            progress.log_note(f"not used in builds: {words}")
        archive.write_tar(todo.sources.context_files(session.spec, settings), files)
        files.seek(0)
        inherited = read_labels(client.images.get(parent.reference))
        oci_labels = provenance.make_oci_labels(parent.name, parent.digest, inherited, session.read_provenance())
        options = {
            "t": image.tag,
            "version": "2",  # BuildKit
            "rm": "1",
            "forcerm": "1",
            "buildargs": json.dumps({"BASE": parent.reference, **dict(settings.proxies), **_caches(session.project)}),
            "networkmode": session.network,
            "labels": json.dumps({**todo.record.labels(), **oci_labels}),
        }
        _send(client, files, options, progress, session.streams)
    if progress.not_locked:
        words = debian_lock.describe_drift(session.project, image, progress.not_locked)
        print_line(f"! {words}", session.display.console)
    if progress.failure or progress.failed_step:
        raise _failure(image.tag, progress, log)


def _caches(project: Project) -> dict[str, str]:
    if project.may_run_code():
        return {}
    # The caches hold packages. A step of a project that was copied from elsewhere could put others there.
    return {"BUILDKIT_CACHE_MOUNT_NS": f"shoal-{hashlib.sha256(bytes(project.root.resolve())).hexdigest()[:16]}"}


def _send(
    client: docker.DockerClient,
    files: IO[bytes],
    options: Mapping[str, str],
    progress: BuildProgress,
    streams: _Streams,
) -> None:
    # The SDK's own `build` can neither ask for BuildKit nor hang up.
    api = client.api
    url = f"{api.base_url}/v{api.api_version}/build"
    headers = {"Content-Type": "application/x-tar"}
    with api.post(url, params=options, data=files, headers=headers, stream=True) as response:
        if response.status_code != requests.codes.ok:
            raise BuildError(f"{options['t']}: Docker refused the build: {response.text.strip()}. Fix: shoal doctor")
        with streams.reading(response):
            # chunk_size=None hands over each chunk as it comes.
            lines = containers.split_lines(response.iter_content(chunk_size=None))
            for event in read_events(json.loads(line) for line in lines if line.strip()):
                progress.show(event)


def _failure(tag: str, progress: BuildProgress, log: Path) -> BuildError | DiskError:
    step = progress.failed_step
    lines = [f"{tag}: the build failed"]
    if step:
        lines = [f"{tag}: step {step.number}/{step.total} failed: {one_line(step.command, 400)}"]
        lines += [f"    {line}" for line in progress.tail]
    message = _COMMAND.sub("it did not", progress.failure or (step.error if step else ""))  # the step names it
    text = "\n".join([*lines, message.strip(), f"The whole log: {log}"])
    if "no space left on device" in text.lower():
        return DiskError(f"{text}\nThe disk is full. Fix: docker builder prune frees Docker's cache")
    return BuildError(text)
