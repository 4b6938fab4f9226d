"""Images: which there are, how they are written, planned and built."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from shoal import docker_client
from shoal.builds import builder, listing, noop_cache
from shoal.commands import output
from shoal.commands.common import EXPECTED, AsJson, Images, Skip, app, console, open_project, say, screen
from shoal.commands.endings import judge
from shoal.errors import ShoalError, SpecError, UsageError
from shoal.sources import render


@app.command("list")
def list_images(images: Images = None, skip: Skip = None, as_json: AsJson = False) -> None:
    """List the images of buildspec.yml, and which of them the engine has."""
    _, matrix = open_project()
    chosen = matrix.choose(images or (), skip or ())
    try:
        client = docker_client.connect(timeout=10)
    except ShoalError:
        client = None
    found = list(listing.list_images(matrix, chosen, client))
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
    outputs = render.render_all(here, matrix.choose(images or (), skip or ()))
    files = render.check_files(outputs) if check else render.write_files(outputs)
    if as_json:
        output.write(files)
    elif not check:
        say("\n".join(map(str, files)))
    if stale := [str(file.path) for file in files if file.state == "stale"]:
        raise SpecError("not what the templates render: " + ", ".join(stale) + ". Run: shoal render")


@app.command("plan")
def plan_images(images: Images = None, skip: Skip = None, as_json: AsJson = False) -> None:
    """Say what a build would do to images, from which step on, and why; build nothing."""
    here, matrix = open_project()
    plans = builder.plan_images(here, matrix, matrix.choose(images or (), skip or ()))
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
    digest: Annotated[
        str | None,
        typer.Option(
            "--bundle-digest", metavar="SHA256", help="The digest that shoal bundle printed; else it is refused."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Build images, and first those that they extend, skipped or not; one that is up to date is left as it is."""
    here, matrix = open_project()
    chosen = matrix.choose(images or (), skip or ())
    progress = screen(as_json)
    if digest and not bundled:
        raise UsageError("--bundle-digest is that of a bundle. Fix: give --bundle DIR too, or leave it out")
    try:
        endings = builder.build_images(here, matrix, chosen, progress, jobs, bundled, digest)
    except EXPECTED as reason:  # before any was tried
        if as_json:
            output.write(
                [builder.BuildResult(image.tag, "not tried", error=reason) for image in matrix.with_parents(chosen)]
            )
        raise
    if as_json:
        output.write(endings)
    judge(endings, progress)
    if context.obj and all(ending.state == "up to date" for ending in endings):
        noop_cache.save_answer(
            context.obj, map(str, endings), builder.find_decisive_ids(matrix.with_parents(chosen), endings)
        )
