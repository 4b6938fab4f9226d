"""Shared by all commands: the application, arguments, output for people and programs, access to the project.

It also parses options, and reports builds and errors of several images.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import os
import re
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import docker.errors
import pydantic
import requests
import typer
import typer.core
import urllib3.exceptions
from rich.console import Console

from shoal import __version__, docker_client
from shoal.builds import builder
from shoal.clean_text import print_document, print_error
from shoal.console import CleanConsole, console, print_line
from shoal.docker_client import images as docker_images
from shoal.errors import DockerError, ShoalError, SpecError, UsageError, convert_os_error
from shoal.matrix import project, spec
from shoal.sources import lock
from shoal.sources.render import GeneratedFile

_HEAD = "_SHOAL_COMPLETE_HEAD"
_SPLIT = "\x1f"


def join_words(environment: MutableMapping[str, str]) -> None:
    """Joins the words that bash splits at colons, so that a tag is one argument again. Changes `environment`.

    Does nothing unless bash asks for completion. The last word keeps only the part that bash will replace. The part
    before it is stored for `complete_images`.
    """
    if environment.get("_SHOAL_COMPLETE") != "complete_bash":
        return
    words = environment["COMP_WORDS"].split("\n")[: int(environment["COMP_CWORD"]) + 1]
    # An empty word after a colon was begun by a space.
    joined = re.sub(r"\n:(\n(?=.)|\Z)", f":{_SPLIT}", "\n".join(words))
    *before, last = joined.split("\n")
    head, _, part = last.rpartition(_SPLIT)
    words = [*(word.replace(_SPLIT, "") for word in before), part]
    environment.update({"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(before)), _HEAD: head})


def complete_images(incomplete: str) -> list[str]:
    """Returns the frameworks and tags that begin with `incomplete`; for bash, only the part after the last colon.

    Returns none if there are no image definitions, or if buildspec.yml is wrong.
    """
    try:
        matrix = spec.load(project.find(Path.cwd()).buildspec)
    except (ShoalError, OSError):
        return []
    head = os.environ.get(_HEAD, "")
    names = (*matrix.defaults, *(image.tag for image in matrix.images))
    return [name.removeprefix(head) for name in names if name.startswith(head + incomplete)]


def complete_jobs(incomplete: str) -> list[str]:
    """Returns the names of this user's jobs on this machine that begin with `incomplete`, running ones first."""
    from shoal.jobs.store import list_jobs  # takes longer than commands on images that repeat

    try:
        names = (each.name for each in list_jobs() if each.name.startswith(incomplete))
        return list(dict.fromkeys(filter(str.isprintable, names)))
    except OSError:
        return []


def complete_jobs_and_images(incomplete: str) -> list[str]:
    """Returns the names of jobs, and then of images, that begin with `incomplete`."""
    return [*complete_jobs(incomplete), *complete_images(incomplete)]


EVERY_DAY, BUILD, RUN, INSPECT, SET_UP = "Every day", "Build images", "Run jobs", "Inspect images", "Set up"
"""The panels of `shoal --help`."""
_FIRST = ("run", "build", "list", "ps", "logs", "stop", "shell", "report", "new", "doctor")
"""The commands of every day, in their order."""


class _Commands(typer.core.TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        others = [name for name in super().list_commands(ctx) if name not in _FIRST]
        return [*(name for name in _FIRST if name in self.commands), *others]


app = typer.Typer(
    cls=_Commands,
    help="Build training images, run jobs, inspect results.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
_REPORT_HELP = "Compare the reports of jobs. The report of one job is report.html in its directory."
reports = typer.Typer(help=_REPORT_HELP, no_args_is_help=True)
app.add_typer(reports, name="report", rich_help_panel=EVERY_DAY)

EXPECTED = (ShoalError, docker.errors.DockerException, requests.RequestException, urllib3.exceptions.HTTPError)
"""Errors that a user can act on. After one, `build` and `push` continue with the next image."""

_NAMES_HELP = "Tags, frameworks, or globs on tags such as 'pytorch-*-gpu-*'."


def _images(more: str) -> Any:
    help_ = f"{_NAMES_HELP} {more}"
    return typer.Argument(metavar="[IMAGE]...", help=help_, autocompletion=complete_images)


Images = Annotated[list[str] | None, _images("Default: all images.")]
NamedImages = Annotated[list[str] | None, _images("Required without --all.")]
Image = Annotated[str, typer.Argument(help="Tag, or framework from buildspec.yml.", autocompletion=complete_images)]
OptionalImage = Annotated[
    str | None,
    typer.Argument(help="Tag, or framework from buildspec.yml.", autocompletion=complete_images),
]
Skip = Annotated[
    list[str] | None,
    typer.Option("--skip", metavar="IMAGE", help="Leave out these images. Repeatable.", autocompletion=complete_images),
]
EveryImage = Annotated[bool, typer.Option("--all", help="All images of buildspec.yml.")]


_documents = {"wanted": False, "printed": False}
"""Whether this command has `--json`, and whether it has printed its document."""


def _note_json(value: bool) -> bool:
    """Notes whether the command has `--json`: a failure is a document then, too."""
    _documents["wanted"] = value
    return value


AsJson = Annotated[
    bool,
    typer.Option(
        "--json", help="Print JSON on standard output, and everything else on standard error.", callback=_note_json
    ),
]

Options = TypeVar("Options")


def _print_version(requested: bool) -> None:
    if requested:
        print_document(f"shoal {__version__}")
        raise typer.Exit


@app.callback()
def accept_global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Define the options that come before a command."""


def takes_fields_of(options: type[Options]) -> Callable[[Callable[[Options], None]], Callable[..., None]]:
    """Returns a decorator for a command that takes a dataclass: typer then sees its fields as parameters."""

    def decorate(command: Callable[[Options], None]) -> Callable[..., None]:
        @functools.wraps(command)
        def call(**values: Any) -> None:
            command(options(**values))

        call.__signature__ = inspect.signature(options, eval_str=True)  # type: ignore[attr-defined]
        call.__annotations__ = get_type_hints(options)
        return call

    return decorate


def progress_console(as_json: bool) -> Console:
    """Returns the console for progress: standard error with `--json`, otherwise standard output."""
    return CleanConsole(stderr=True) if as_json else console


def print_columns(*rows: Sequence[str]) -> None:
    """Prints rows with aligned, whole cells. A rich table would cut tags and paths on a narrow terminal."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print_line("  ".join(map(str.ljust, row, widths)).rstrip())


def print_written(paths: Iterable[Path], on: Console = console) -> None:
    """Prints a line for each file that was written."""
    for path in paths:
        print_line(f"wrote {path}", on)


def print_json(document: object) -> None:
    """Prints a JSON document; dataclasses, pydantic models, paths and exceptions may be parts of it."""
    _documents["printed"] = True
    print_document(format_json(document))


def print_failure(failure: ShoalError) -> None:
    """Prints a failure; with `--json`, also as a document if the command has printed none: jq accepts an empty one."""
    if _documents["wanted"] and not _documents["printed"]:
        print_json({"error": str(failure), "exit_code": failure.exit_code})
    print_error(str(failure))


def format_json(document: object) -> str:
    """Returns the text that `print_json` prints."""
    return json.dumps(document, indent=2, default=_convert_to_json, ensure_ascii=True)


def _convert_to_json(value: object) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, pydantic.BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Exception):
        return str(value) or type(value).__name__
    raise TypeError(f"{type(value).__name__} cannot be converted to JSON")


def open_project(*, to_write: bool = False) -> tuple[project.Project, spec.BuildSpec]:
    """Returns the project around the current directory, or the definitions that `shoal` comes with, and its matrix.

    With `to_write`, only a project. Raises `UsageError` or `SpecError`.
    """
    here = project.find_editable(Path.cwd()) if to_write else project.find(Path.cwd())
    return here, spec.load(here.buildspec)


def choose_images(
    matrix: spec.BuildSpec, command: str, names: list[str] | None, skip: list[str] | None, every: bool
) -> list[spec.ImageSpec]:
    """Returns the images that an expensive command takes. Raises `UsageError` unless it has either names or `--all`."""
    if names and every:
        raise UsageError(f"{' '.join(names)} and --all: contradict each other. Fix: leave out one")
    if not names and not every:
        raise UsageError(
            f"No image is named. Fix: name images, such as shoal {command} pytorch, or add --all for all"
            f" {len(matrix.images)} images"
        )
    return matrix.choose(names or (), skip or ())


def load_matrix() -> spec.BuildSpec | None:
    """Returns the matrix that commands in the current directory use; None if there is none."""
    try:
        return open_project()[1]
    except UsageError:
        return None


def resolve_tag(name: str) -> str:
    """Returns the tag of an image of the matrix, or of one that Docker has as `NAME:latest`.

    A name with a colon is a tag already. Raises `UsageError` if the name matches none or several, or there is no
    matrix, `SpecError` if its buildspec is wrong.
    """
    if ":" in name:
        return name
    try:
        return open_project()[1].select(name).tag
    except UsageError:
        tag = f"{name}:latest"
        if _has_image(tag):
            return tag
        raise


def _has_image(tag: str) -> bool:
    try:
        return docker_images.find_image(docker_client.connect(), tag) is not None
    except (DockerError, docker.errors.APIError):
        return False


def parse_pairs(option: str, words: list[str] | None) -> dict[str, str]:
    """Returns the names and values of a repeatable option `NAME=VALUE`.

    Raises `UsageError` if a word has another form, or a name is given twice.
    """
    pairs = {}
    for word in words or ():
        key, equals, value = word.partition("=")
        if not key or not equals:
            raise UsageError(f"{option} {word}: expected NAME=VALUE. Fix: for example {option} name=value")
        if key in pairs:
            raise UsageError(f"{option} {key}: given twice. Fix: leave out one")
        pairs[key] = value
    return pairs


def convert_error(error: Exception) -> ShoalError | None:
    """Returns the failure that a user can act on; None if `error` is a defect."""
    if isinstance(error, ShoalError):
        return error
    if isinstance(error, docker.errors.APIError):
        return DockerError(f"Docker refused a request: {error.explanation or error}. Fix: check Docker: shoal doctor")
    # Before OSError, of which the errors of requests are subclasses.
    if isinstance(error, docker.errors.DockerException | requests.RequestException | urllib3.exceptions.HTTPError):
        return DockerError(f"A request to Docker failed: {error}. Fix: see whether Docker answers: docker info")
    return convert_os_error(error) if isinstance(error, OSError) else None


def report_builds(results: Iterable[builder.BuildResult], progress: Console) -> None:
    """Prints how each build ended. If builds failed, prints all errors but the first, and raises the first."""
    for result in results:
        print_line(str(result), progress)
    raise_first(result.error for result in results if result.state == "failed")


def raise_stale(
    here: project.Project, matrix: spec.BuildSpec, images: Iterable[spec.ImageSpec], files: Iterable[GeneratedFile]
) -> None:
    """Raises `SpecError` if locks of images do not fit, or generated files are stale. Other such errors are printed."""
    problems = lock.find_stale(here, matrix, images)
    if stale := [str(file.path) for file in files if file.state == "stale"]:
        problems.append(f"not up to date with the templates: {', '.join(stale)}. Fix: shoal render")
    raise_first(map(SpecError, problems))


def raise_first(errors: Iterable[Exception | None]) -> None:
    """Raises the first of the errors, after printing the others to standard error. None stands for success."""
    failures = [error for error in errors if error]
    for error in failures[1:]:
        print_error(str(error))
    if failures:
        raise failures[0]
