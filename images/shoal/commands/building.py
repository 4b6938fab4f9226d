"""Images: which there are, how they are written, locked, planned, built and pushed."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import docker
import typer
from rich.console import Console
from rich.table import Table

from shoal import engine
from shoal.build import builder, bundle, listing, push, unchanged
from shoal.commands import output
from shoal.commands.common import EXPECTED, AsJson, Images, Skip, app, console, open_project, say, screen
from shoal.commands.endings import judge, raise_first
from shoal.errors import ShoalError, SpecError
from shoal.sources import lock, render


@app.command("list")
def list_images(images: Images = None, skip: Skip = None, as_json: AsJson = False) -> None:
    """List the images of buildspec.yml, and which of them the engine has."""
    _, matrix = open_project()
    chosen = matrix.choose(images or (), skip or ())
    try:
        client = engine.connect(timeout=10)
    except ShoalError:
        client = None
    found = list(listing.listed(matrix, chosen, client))
    if as_json:
        output.write(found)
        return
    table = Table("image", "default for", "built", box=None)
    table.columns[0].no_wrap = True
    for image in found:
        built = {"unknown": "?", "not built": "no"}.get(image.state, str(image.image_id)[7:19])
        table.add_row(image.tag, ", ".join(image.default_for), built)
    console.print(table, soft_wrap=True)


@app.command("render")
def render_images(
    images: Images = None,
    skip: Skip = None,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail when a committed file is stale.")] = False,
    as_json: AsJson = False,
) -> None:
    """Render the Dockerfiles from their templates into dockerfiles/rendered/, and the schemas of the YAML files."""
    here, matrix = open_project()
    outputs = render.outputs(here, matrix.choose(images or (), skip or ()))
    files = render.compare(outputs) if check else render.write(outputs)
    if as_json:
        output.write(files)
    elif not check:
        _tell(files)
    if stale := [str(file.path) for file in files if file.state == "stale"]:
        raise SpecError("not what the templates render: " + ", ".join(stale) + ". Run: shoal render")


def _tell(files: Iterable[render.Rendered]) -> None:
    for file in files:
        say(f"{file.state:<7} {file.path}")


@app.command("lock")
def lock_images(images: Images = None, skip: Skip = None, as_json: AsJson = False) -> None:
    """Resolve the requirements of images to exact files with hashes, in dockerfiles/requirements/, and render them."""
    here, matrix = open_project()
    chosen = matrix.choose(images or (), skip or ())
    progress = screen(as_json)
    locks = []
    locked = {here.lock_directory(image): image for image in reversed(chosen)}
    for image in reversed(locked.values()):
        with progress.status(f"resolving {image.tag}"):
            paths = lock.lock_image(here, matrix, image)
        for path in paths:
            pins = len(lock.read_lock(path))
            locks.append({"tag": image.tag, "path": path, "pins": pins})
            progress.print(f"{pins:3} pins  {path}", markup=False, soft_wrap=True)
    variants = [image for image in matrix.images if here.lock_directory(image) in locked]
    files = render.write(render.outputs(here, variants))
    if as_json:
        output.write({"locks": locks, "rendered": files})
    else:
        _tell(files)


@app.command("plan")
def plan_images(images: Images = None, skip: Skip = None, as_json: AsJson = False) -> None:
    """Say what a build would do to images, from which step on, and why; build nothing."""
    here, matrix = open_project()
    plans = builder.plan(here, matrix, matrix.choose(images or (), skip or ()))
    if as_json:
        output.write(plans)
    else:
        say("\n".join(map(str, plans)))


@app.command("build")
def build_images(
    context: typer.Context,
    images: Images = None,
    skip: Skip = None,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Builds at once.")] = 2,
    bundled: Annotated[
        Path | None, typer.Option("--bundle", metavar="DIR", help="Take all from what shoal bundle wrote; no network.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Build images, and first those that they extend, skipped or not; one that is up to date is left as it is."""
    here, matrix = open_project()
    chosen = matrix.choose(images or (), skip or ())
    progress = screen(as_json)
    try:
        endings = builder.build_all(here, matrix, chosen, progress, jobs, bundled)
    except EXPECTED as reason:  # before any was tried
        if as_json:
            output.write(
                [builder.Ending(image.tag, "not tried", error=reason) for image in matrix.with_parents(chosen)]
            )
        raise
    if as_json:
        output.write(endings)
    judge(endings, progress)
    if context.obj and all(ending.state == "up to date" for ending in endings):
        unchanged.remember(
            context.obj, map(builder.told, endings), builder.decisive(matrix.with_parents(chosen), endings)
        )


@app.command("bundle")
def bundle_images(
    directory: Annotated[Path, typer.Argument(help="Where; what lies there already stays.")],
    images: Images = None,
    skip: Skip = None,
    as_json: AsJson = False,
) -> None:
    """Collect what builds take from a network into a directory, from which `shoal build --bundle` needs none."""
    here, matrix = open_project()
    tell = functools.partial(say, on=screen(as_json))
    made = bundle.collect(here, matrix, matrix.choose(images or (), skip or ()), directory, tell)
    if as_json:
        output.write(made)
    tell(f"✓ {directory}: {made.bytes / 1024**2:,.0f} MiB")


@app.command("push")
def push_images(
    to: Annotated[str, typer.Option(metavar="REGISTRY[/PREFIX]", help="Such as registry.example.org/team.")],
    images: Images = None,
    skip: Skip = None,
    as_json: AsJson = False,
) -> None:
    """Push built images to a registry, with the credentials of `docker login`; a network's hiccups are tried again."""
    _, matrix = open_project()
    targets = {image.tag: push.reference(image.tag, to) for image in matrix.choose(images or (), skip or ())}
    client = engine.connect()
    progress = screen(as_json)
    endings = [_pushed(client, tag, target, progress) for tag, target in targets.items()]
    if as_json:
        output.write(endings)
    raise_first(ending.error for ending in endings)


def _pushed(client: docker.DockerClient, tag: str, target: str, progress: Console) -> push.Pushed:
    """Push an image, and return how that ended; a failure does not keep others from being pushed."""
    started = time.monotonic()
    try:
        pushed = push.push(client, tag, target, progress)
    except EXPECTED as error:
        return push.Pushed(tag, target, "failed", round(time.monotonic() - started, 3), error=error)
    say(f"✓ {target}@{pushed.digest} in {pushed.seconds:.1f} s", progress)
    return pushed
