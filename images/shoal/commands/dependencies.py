"""Images and networks: what they need is locked and collected there, and they are pushed to registries."""

from __future__ import annotations

import functools
import time
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import docker
import typer
from rich.console import Console

from shoal import docker_client
from shoal.builds import bundle, debian_lock, push
from shoal.commands import output
from shoal.commands.common import EXPECTED, AsJson, Images, Skip, app, open_project, say, screen
from shoal.commands.endings import raise_first
from shoal.errors import SpecError, UsageError
from shoal.matrix.project import Project
from shoal.matrix.spec import BuildSpec, ImageSpec
from shoal.sources import lock, pins, render


@app.command("lock")
def lock_images(
    images: Images = None,
    skip: Skip = None,
    bases: Annotated[
        bool,
        typer.Option("--bases", help="Lock the base images and Debian's packages instead, in dockerfiles/debian/."),
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="With --bases: write nothing; fail if Debian has others now.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Resolve the requirements of images to exact files with hashes, in dockerfiles/requirements/, and render them.

    Children whose locks do not fit what an image has then are locked again too, unless --skip names them.
    """
    here, matrix = open_project()
    if bases:
        _lock_bases(here, matrix, matrix.choose(images or (), skip or ()), check=check, as_json=as_json)
        return
    if check:
        raise UsageError("--check goes with --bases alone. Fix: shoal lock --bases --check")
    chosen = {image.tag for image in matrix.choose(images or (), skip or ())}
    progress = screen(as_json)
    locks = []
    locked: set[Path] = set()
    try:
        for image in matrix.choose(skip=skip or ()):  # parents first
            if not _is_to_lock(here, matrix, image, chosen, locked):
                continue
            with progress.status(f"resolving {image.tag}"):
                paths = lock.lock_image(here, matrix, image)
            locked.add(here.lock_directory(image))
            for path in paths:
                count = len(pins.read_lock(path))
                locks.append({"tag": image.tag, "path": path, "pins": count})
                progress.print(f"{count:3} pins  {path}", markup=False, soft_wrap=True)
    finally:  # where one cannot be resolved, a child mostly, those before it are locked all the same
        variants = [image for image in matrix.images if here.lock_directory(image) in locked]
        files = render.write_files(render.render_all(here, variants))
    if as_json:
        output.write({"locks": locks, "rendered": files})
    else:
        say("\n".join(map(str, files)))


def _lock_bases(here: Project, matrix: BuildSpec, images: list[ImageSpec], *, check: bool, as_json: bool) -> None:
    tell = functools.partial(say, on=screen(as_json))
    systems = list(dict.fromkeys(image.system for image in images))
    made = []
    for locked in debian_lock.lock_systems(here, matrix, systems, tell, write=not check):
        made.append(locked)
        tell(f"{locked.packages:3} packages  {locked.path}{'' if locked.changes else ': unchanged'}")
        for change in locked.changes:
            tell(f"    {change}")
    if as_json:
        output.write(made)
    if check and (changed := [locked.suite for locked in made if locked.changes]):
        raise SpecError(f"Debian {', '.join(changed)} has other packages or base images now. Fix: shoal lock --bases")


def _is_to_lock(
    here: Project, matrix: BuildSpec, image: ImageSpec, chosen: Collection[str], locked: Collection[Path]
) -> bool:
    """Whether an image is chosen, or stands on what has been locked and does not fit it. Variants share a lock."""
    if here.lock_directory(image) in locked:
        return False
    parent = matrix.parent(image)
    on_locked = parent is not None and here.lock_directory(parent) in locked
    return image.tag in chosen or (on_locked and not pins.are_current(here, matrix, image))


@app.command("bundle")
def bundle_images(
    directory: Annotated[Path, typer.Argument(help="Where; what lies there already stays.")],
    images: Images = None,
    skip: Skip = None,
    as_json: AsJson = False,
) -> None:
    """Collect what builds take from a network into a directory, from which `shoal build --bundle` needs none.

    Keep the digest that is printed apart from the directory: with it, builds elsewhere see what was changed on the way.
    """
    here, matrix = open_project()
    tell = functools.partial(say, on=screen(as_json))
    made = bundle.fill_bundle(here, matrix, matrix.choose(images or (), skip or ()), directory, tell)
    if as_json:
        output.write(made)
    tell(f"✓ {directory}: {made.bytes / 1024**2:,.0f} MiB, digest sha256:{made.digest}")
    tell(f"there: shoal build --bundle {directory} --bundle-digest sha256:{made.digest}")


@app.command("push")
def push_images(
    to: Annotated[str, typer.Option(metavar="REGISTRY[/PREFIX]", help="Such as registry.example.org/team.")],
    images: Images = None,
    skip: Skip = None,
    as_json: AsJson = False,
) -> None:
    """Push built images to a registry, with the credentials of `docker login`; a network's hiccups are tried again."""
    _, matrix = open_project()
    targets = {image.tag: push.make_reference(image.tag, to) for image in matrix.choose(images or (), skip or ())}
    client = docker_client.connect()
    progress = screen(as_json)
    endings = [_pushed(client, tag, target, progress) for tag, target in targets.items()]
    if as_json:
        output.write(endings)
    raise_first(ending.error for ending in endings)


def _pushed(client: docker.DockerClient, tag: str, target: str, progress: Console) -> push.Pushed:
    """Push an image, and return how that ended; a failure does not keep others from being pushed."""
    started = time.monotonic()
    try:
        pushed = push.push_image(client, tag, target, progress)
    except EXPECTED as error:
        return push.Pushed(tag, target, "failed", round(time.monotonic() - started, 3), error=error)
    say(f"✓ {target}@{pushed.digest} in {pushed.seconds:.1f} s", progress)
    return pushed
