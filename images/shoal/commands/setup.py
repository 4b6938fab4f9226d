"""Where one begins: is this machine ready, and a project of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal import doctor, scaffold
from shoal.commands import output
from shoal.commands.common import AsJson, app, open_project, say, tell_written


@app.command("doctor")
def examine(
    fix: Annotated[
        bool, typer.Option("--fix", help="Do what can be done: start an engine where none answers.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check what builds and jobs need of this machine: engine, disk, network, certificates; say what to do."""
    site = doctor.Site(Path.cwd())
    findings = doctor.examine(site)
    if fix and doctor.mend(site, findings):
        findings = doctor.examine(site)
    if as_json:
        output.write(findings)
    else:
        say(doctor.told(findings))
    doctor.judge(findings)


@app.command("new")
def new_project(
    directory: Annotated[Path, typer.Argument(help="Where; its last part is the image's name.")],
    image: Annotated[str, typer.Option(help="What it stands on: a tag, or a framework of buildspec.yml.")] = "pytorch",
    as_json: AsJson = False,
) -> None:
    """Write a project for an image of your own: a Dockerfile on one of ours, a script that trains, a test."""
    _, matrix = open_project()
    written = scaffold.write(directory.absolute(), matrix.select(image))
    if as_json:
        output.write(written)
    else:
        tell_written(written)
