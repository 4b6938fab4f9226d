"""The command `cache prune`, which frees space."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal.builds import base_image
from shoal.builds.cache import prune_cache
from shoal.commands.common import SET_UP, AsJson, app, open_project, print_json
from shoal.console import print_line

cache = typer.Typer(help="Free the space of Shoal's own cache.", no_args_is_help=True)
app.add_typer(cache, name="cache", rich_help_panel=SET_UP)


@cache.command("prune", epilog="More: docs/install.md")
def prune(
    every: Annotated[
        bool, typer.Option("--all", help="Also remove base images in use. A build without a registry makes them again.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove build logs, installed copies of our packages, and base images that no image uses.

    Later builds make again what they need. For Docker's own cache, use docker builder prune.

    Example: shoal cache prune
    """
    here, matrix = open_project()
    bases = () if every else {base_image.archive_path(here.cache, system) for system in matrix.systems()}
    removed = prune_cache(here.cache, bases)
    if as_json:
        print_json(removed)
        return
    freed = sum(file.bytes for file in removed) / 1024**2
    print_line(f"✓ {here.cache}: {len(removed)} files removed, {freed:,.1f} MiB freed")
