"""Commands on the images of buildspec.yml: list, render, build and push."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import docker
import typer
from rich.console import Console

from shoal import docker_client
from shoal.builds import builder, listing, plan, push
from shoal.builds.layers import Compression
from shoal.commands.common import (
    BUILD,
    EVERY_DAY,
    EXPECTED,
    AsJson,
    EveryImage,
    Images,
    NamedImages,
    Skip,
    app,
    choose_images,
    open_project,
    print_columns,
    print_json,
    progress_console,
    raise_first,
    raise_stale,
    report_builds,
)
from shoal.console import print_line, print_lines
from shoal.errors import ShoalError, UsageError
from shoal.sources import render


@app.command("list", rich_help_panel=EVERY_DAY, epilog="More: docs/build.md")
def list_images(images: Images = None, skip: Skip = None, as_json: AsJson = False) -> None:
    """List the images of buildspec.yml, and show which are built.

    Example: shoal list '*-gpu-*'
    """
    _, matrix = open_project()
    chosen = matrix.choose(images or (), skip or ())
    try:
        client = docker_client.connect(timeout=10)
    except ShoalError:
        client = None
    found = list(listing.list_images(matrix, chosen, client))
    if as_json:
        print_json(found)
        return
    states = {"unknown": "?", "not built": "no"}
    built = [states.get(image.state, str(image.image_id)[7:19]) for image in found]
    rows = [(image.tag, state, ", ".join(image.default_for)) for image, state in zip(found, built)]
    print_columns(("image", "built", "default for"), *rows)


@app.command("render", rich_help_panel=BUILD, epilog="More: CONTRIBUTING.md")
def render_images(
    images: Images = None,
    skip: Skip = None,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; fail if a committed file or a lock is stale.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Render Dockerfiles to dockerfiles/rendered/, and the JSON schemas of the YAML files.

    Example: shoal render --check
    """
    here, matrix = open_project(to_write=not check)
    chosen = matrix.choose(images or (), skip or ())
    outputs = render.render_all(here, chosen)
    files = render.check_files(outputs) if check else render.write_files(outputs)
    if as_json:
        print_json(files)
    elif not check:
        print_lines(map(str, files))
    if check:
        raise_stale(here, matrix, chosen, files)


@app.command("build", rich_help_panel=EVERY_DAY, epilog="More: docs/build.md")
def build_images(
    images: NamedImages = None,
    skip: Skip = None,
    every: EveryImage = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Build nothing; show which images would be built, from which step, why.")
    ] = False,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Number of parallel builds.")] = 2,
    bundle: Annotated[
        Path | None,
        typer.Option("--bundle", metavar="DIR", help="Build offline from a directory made by shoal bundle."),
    ] = None,
    bundle_digest: Annotated[
        str | None,
        typer.Option("--bundle-digest", metavar="SHA256", help="Refuse the bundle unless it has this digest."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Build images that are not up to date, and before them the images that they extend, even if you --skip those.

    Example: shoal build 'pytorch-*-cpu-*'
    """
    here, matrix = open_project()
    chosen = choose_images(matrix, "build", images, skip, every)
    if dry_run:
        decisions = [each.decision for each in plan.plan_builds(here, matrix, chosen)]
        if as_json:
            print_json(decisions)
        else:
            print_lines(map(str, decisions))
        return
    progress = progress_console(as_json)
    if bundle_digest and not bundle:
        raise UsageError("--bundle-digest has no effect without a bundle. Fix: add --bundle DIR, or leave it out")
    try:
        results = builder.build_images(here, matrix, chosen, progress, jobs, bundle, bundle_digest)
    except EXPECTED as reason:  # before the first build
        if as_json:
            tags = [image.tag for image in matrix.with_parents(chosen)]
            print_json([builder.BuildResult(tag, "not tried", error=reason) for tag in tags])
        raise
    if as_json:
        print_json(results)
    report_builds(results, progress)


@app.command("push", rich_help_panel=BUILD, epilog="More: docs/build.md")
def push_images(
    to: Annotated[
        str, typer.Option(metavar="REGISTRY[/PREFIX]", help="Where to push, such as registry.example.org/team.")
    ],
    images: NamedImages = None,
    skip: Skip = None,
    every: EveryImage = False,
    compression: Annotated[
        Compression | None,
        typer.Option(
            help="Compress the layers again. zstd is smaller; Docker 23, containerd 1.5 and later can pull it. Without"
            " it, they are Docker's gzip."
        ),
    ] = None,
    lazy: Annotated[
        bool,
        typer.Option("--lazy", help="Add a SOCI index, with which clients of SOCI start jobs before the pull ends."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Push built images to a registry, with the credentials of `docker login`. Network errors are retried.

    If an image cannot be pushed, the others still are.

    Example: shoal push pytorch --to registry.example.org/team
    """
    if lazy and compression == "zstd":
        raise UsageError("--lazy with --compression zstd: clients of SOCI read gzip only. Fix: leave out one of them")
    stored = push.Format(compression, lazy)
    _, matrix = open_project()
    chosen = choose_images(matrix, f"push --to {to}", images, skip, every)
    targets = {image.tag: push.make_reference(image.tag, to) for image in chosen}
    client = docker_client.connect()
    progress = progress_console(as_json)
    results = [_push_image(client, tag, target, progress, stored) for tag, target in targets.items()]
    if as_json:
        print_json(results)
    raise_first(result.error for result in results)


def _push_image(
    client: docker.DockerClient, tag: str, target: str, progress: Console, stored: push.Format
) -> push.Pushed:
    """An error that a user can act on becomes part of the result, and is not printed. Others are raised."""
    started = time.monotonic()
    try:
        pushed = push.push_image(client, tag, target, progress, stored=stored)
    except EXPECTED as error:
        return push.Pushed(tag, target, "failed", round(time.monotonic() - started, 3), error=error)
    print_line(f"✓ {target}@{pushed.digest} in {pushed.seconds:.1f} s", progress)
    return pushed
