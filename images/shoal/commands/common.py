"""What the commands share: the application, arguments that several take, where they print, the project they are in."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import docker.errors
import requests
import typer
import urllib3.exceptions
from rich.console import Console

from shoal import __version__
from shoal.commands import completion
from shoal.errors import ShoalError, UsageError
from shoal.matrix import project, spec

app = typer.Typer(
    help="Builds training images, runs jobs in them, and shows what is inside and what happened.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
reports = typer.Typer(help="Pictures and tables of images, and of what a job did.", no_args_is_help=True)
app.add_typer(reports, name="report")
console = Console(highlight=False)

EXPECTED = (ShoalError, docker.errors.DockerException, requests.RequestException, urllib3.exceptions.HTTPError)
"""The failures of builds and pushes that have words and an exit code, and do not keep the next from being tried."""

_IMAGES_HELP = "Tags, frameworks, or globs on tags such as 'pytorch-*-gpu-*'; none: all images."
Images = Annotated[
    list[str] | None, typer.Argument(metavar="[IMAGE]...", help=_IMAGES_HELP, autocompletion=completion.images)
]
Image = Annotated[str, typer.Argument(help="A tag, or a framework of buildspec.yml.", autocompletion=completion.images)]
Skip = Annotated[
    list[str] | None,
    typer.Option("--skip", metavar="IMAGE", help="Leave these out; repeatable.", autocompletion=completion.images),
]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON on standard output; all else goes to standard error.")]


def _print_version(asked: bool) -> None:
    if asked:
        print(f"shoal {__version__}")
        raise typer.Exit


@app.callback()
def every_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Take the options that come before a command."""


def screen(as_json: bool) -> Console:
    """Return where progress goes: standard output belongs to the document, where one is asked for."""
    return Console(stderr=True, highlight=False) if as_json else console


def say(text: str, on: Console = console) -> None:
    """Print a line as it is."""
    on.print(text, markup=False, soft_wrap=True)


def tell_written(paths: Iterable[Path], on: Console = console) -> None:
    for path in paths:
        say(f"written {path}", on)


def open_project() -> tuple[project.Project, spec.BuildSpec]:
    """Return the checkout that this is in, and its matrix. Raises UsageError, SpecError."""
    here = project.find(Path.cwd())
    return here, spec.load(here.buildspec)


def matrix_here() -> spec.BuildSpec | None:
    """Return the matrix; None outside a checkout, where images of the engine can still be looked at."""
    try:
        return open_project()[1]
    except UsageError:
        return None


def tag_of(name: str) -> str:
    """Return the tag that `name` means; a foreign tag is taken as it is."""
    return name if ":" in name else open_project()[1].select(name).tag
