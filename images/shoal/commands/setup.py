"""Commands to set up: `doctor` checks this machine, `new` and `init` write files, `trust` and `cache` manage others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal import doctor, scaffold, trust
from shoal.builds import base_image
from shoal.commands.common import EVERY_DAY, SET_UP, AsJson, app, open_project, print_json, print_written
from shoal.console import print_line, print_lines
from shoal.errors import UsageError
from shoal.matrix.project import prune_cache


@app.command("doctor", rich_help_panel=EVERY_DAY, epilog="More: docs/install.md")
def check_machine(
    fix: Annotated[
        bool, typer.Option("--fix", help="Fix what can be fixed: start Docker if it does not answer.")
    ] = False,
    bundle: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Check this bundle for offline builds, and not the network of builds."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check whether this machine can build images and run jobs, and print fixes.

    Checks Docker, disk, memory, network, certificates and GPUs.

    Example: shoal doctor --fix
    """
    site, checks = doctor.Site(Path.cwd(), bundle=bundle), doctor.choose_checks(bundle)
    findings = doctor.run_checks(site, checks)
    if fix and doctor.apply_fixes(site, findings):
        findings = doctor.run_checks(site, checks)
    if as_json:
        print_json(findings)
    else:
        print_lines(doctor.format_findings(findings).split("\n"))
    doctor.raise_failures(findings)


@app.command("new", rich_help_panel=EVERY_DAY, epilog="More: docs/recipes.md")
def create_project(
    directory: Annotated[Path, typer.Argument(help="Directory to create. Its name becomes the image's name.")],
    image: Annotated[str, typer.Option(help="Base image: a tag, or a framework from buildspec.yml.")] = "pytorch",
    as_json: AsJson = False,
) -> None:
    """Create a project for your own image: a Dockerfile, a training script and a test.

    Example: shoal new my-training --image tensorflow
    """
    _, matrix = open_project()
    base = matrix.select(image)
    written = scaffold.write_project(directory.absolute(), base)
    if as_json:
        print_json(written)
        return
    print_written(written)
    print_line(f"based on {base.tag}; for another: --image TAG (`shoal list`)")
    print_line(f"next: docker build -t {directory.absolute().name} {directory}, and see README.md there")


@app.command("init", rich_help_panel=SET_UP, epilog="More: docs/install.md")
def write_definitions(
    directory: Annotated[Path, typer.Argument(help="Directory to write to. It is created if it is missing.")] = Path(),
    as_json: AsJson = False,
) -> None:
    """Write buildspec.yml and dockerfiles/, which define the images, so that you can change them.

    Commands in this directory and below use these files. Elsewhere they use the ones that shoal comes with.

    Example: shoal init && shoal build 'pytorch-*-cpu-*'
    """
    written = scaffold.write_definitions(directory.absolute())
    if as_json:
        print_json(written)
    else:
        print_written(written)


@app.command("trust", rich_help_panel=SET_UP, epilog="More: docs/security.md")
def trust_directory(
    directory: Annotated[Path, typer.Argument(help="Directory of a project or a job, or one with several.")],
) -> None:
    """Trust a directory that others own or can write to: commands then build, run and stop what its files say.

    A job that was moved or copied here can be continued once its own directory is named.

    To end the trust, remove the line from the file that the command prints.

    Example: shoal trust /src
    """
    if not directory.is_dir() or "\n" in str(directory.resolve()):
        raise UsageError(f"{directory}: no such directory, or its name has a line break. Fix: name an existing one")
    print_line(f"trusted: {directory.resolve()}, in {trust.add_trusted(directory)}")


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
