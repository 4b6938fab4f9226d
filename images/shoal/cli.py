"""The command `shoal`: list, render, lock, build, run, plan-model, report."""

from __future__ import annotations

import json
import signal
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import docker.errors
import requests
import typer
from rich.console import Console
from rich.table import Table

from shoal import builder, embedded, engine, lock, planning, project, render, spec, summary
from shoal import run as runner
from shoal.errors import EngineError, ShoalError, SpecError, UsageError
from shoal.job import JobRequest
from shoal.report import timeline

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
reports = typer.Typer(help="Pictures and tables of what a job did.", no_args_is_help=True)
app.add_typer(reports, name="report")
console = Console(highlight=False)
Images = Annotated[list[str] | None, typer.Argument(metavar="[IMAGE]...", help="Tags or frameworks; none: all images.")]


HYPERPARAMETER_HELP = (
    "Repeatable. VALUE is JSON where it is valid JSON (1.10 is a number, '\"1.10\"' a text), else a text."
)


PLAN_HELP = "--mp-parameters JSON, --devices N, --memory GIB, --optimizer sgd|momentum|adam."


class Engine(StrEnum):
    """Where a job runs."""

    docker = "docker"
    none = "none"


def main() -> None:
    """Run the command line; every expected failure prints its text and exits with its own code.

    SIGTERM and SIGHUP end it as an interrupt does: what runs is stopped and removed on the way out.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    try:
        app(standalone_mode=True)
    except ShoalError as error:
        print(f"shoal: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except docker.errors.APIError as error:
        print(f"shoal: the engine refused: {error.explanation or error}", file=sys.stderr)
        sys.exit(EngineError.exit_code)
    except (docker.errors.DockerException, requests.RequestException) as error:
        print(f"shoal: the engine could not be asked: {error}", file=sys.stderr)
        sys.exit(EngineError.exit_code)


def _end(number: int, _frame: object) -> None:
    sys.exit(128 + number)


def _open() -> tuple[project.Project, spec.BuildSpec]:
    here = project.find(Path.cwd())
    return here, spec.load(here.buildspec)


def _select(matrix: spec.BuildSpec, names: list[str] | None) -> list[spec.ImageSpec]:
    return [matrix.select(name) for name in names] if names else list(matrix.images)


@app.command("list")
def list_images(images: Images = None) -> None:
    """List the images of buildspec.yml, and which of them the engine has."""
    _, matrix = _open()
    chosen = _select(matrix, images)
    try:
        client = engine.connect(timeout=10)
    except ShoalError:
        client = None
    table = Table("image", "default for", "built", box=None)
    table.columns[0].no_wrap = True
    for image in chosen:
        default = ", ".join(name for name, tag in matrix.defaults.items() if tag == image.tag)
        found = builder.find(client, image.tag) if client else None
        built = "?" if client is None else str(found.id)[7:19] if found else "no"
        table.add_row(image.tag, default, built)
    console.print(table, soft_wrap=True)


@app.command("render")
def render_images(
    images: Images = None,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail when a committed file is stale.")] = False,
) -> None:
    """Render the Dockerfiles from their templates into dockerfiles/rendered/."""
    here, matrix = _open()
    stale = []
    for image in _select(matrix, images):
        path = here.rendered(image)
        if check:
            if not path.is_file() or path.read_text() != render.render(here, image):
                stale.append(str(path))
        else:
            console.print(
                f"{'written' if render.write(here, image) else 'same   '} {path}", markup=False, soft_wrap=True
            )
    if stale:
        raise SpecError("not what the templates render: " + ", ".join(stale) + ". Run: shoal render")


@app.command("lock")
def lock_images(images: Images = None) -> None:
    """Resolve the requirements of images to exact files with hashes, in dockerfiles/requirements/."""
    here, matrix = _open()
    for image in _select(matrix, images):
        with console.status(f"resolving {image.tag}"):
            paths = lock.lock_image(here, matrix, image)
        for path in paths:
            console.print(f"{len(lock.read_lock(path)):3} pins  {path}", markup=False, soft_wrap=True)


@app.command("build")
def build_images(images: Images = None) -> None:
    """Build images; one that is up to date is left as it is."""
    here, matrix = _open()
    for image in _select(matrix, images):
        _build(here, matrix, image)


def _build(here: project.Project, matrix: spec.BuildSpec, image: spec.ImageSpec) -> float:
    built = builder.build(here, matrix, image, console)
    verb = "up to date" if built.up_to_date else "built"
    console.print(
        f"✓ {built.tag} {verb} in {built.seconds:.1f} s ({built.image_id[7:19]})", markup=False, soft_wrap=True
    )
    return built.seconds


@app.command("run")
def run_job(
    image: Annotated[str, typer.Argument(help="A tag, or a framework of buildspec.yml.")],
    source: Annotated[Path, typer.Option(help="The directory with the script.")],
    entry_point: Annotated[str, typer.Option(help="The script, relative to --source.")],
    hosts: Annotated[int, typer.Option(min=1, help="Containers that play hosts.")] = 1,
    procs_per_host: Annotated[int | None, typer.Option(min=1, help="MPI ranks a host.")] = None,
    channel: Annotated[list[str] | None, typer.Option(metavar="NAME=DIR", help="Input data; repeatable.")] = None,
    hyperparameter: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help=HYPERPARAMETER_HELP)] = None,
    distribution: Annotated[str, typer.Option(metavar="JSON", help="The estimator's distribution.")] = "{}",
    env: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="For every host; repeatable.")] = None,
    output: Annotated[Path, typer.Option(help="Where the job's directory is made.")] = Path("jobs"),
    shm_size: Annotated[str, typer.Option(help="/dev/shm of each host.")] = "1g",
    build: Annotated[bool, typer.Option("--build", help="Bring the image up to date first.")] = False,
    engine_kind: Annotated[
        Engine, typer.Option("--engine", help="none: on this machine, without Docker.")
    ] = Engine.docker,
) -> None:
    """Run a training job, and exit with its verdict."""
    request = JobRequest(
        source=source,
        entry_point=entry_point,
        hosts=hosts,
        procs_per_host=procs_per_host,
        channels={name: Path(value) for name, value in _pairs("--channel", channel).items()},
        hyperparameters=_pairs("--hyperparameter", hyperparameter),
        distribution=_json_object("--distribution", distribution),
        environment=_pairs("--env", env),
        output=output,
        shm_size=shm_size,
    )
    request.check()
    build_seconds = None
    if engine_kind is Engine.none:
        _image_to_run(image, build=False)
        outcome = embedded.run(request, console)
    else:
        tag, build_seconds = _image_to_run(image, build)
        outcome = runner.run(tag, request, console)
    summary.show(console, request, outcome, build_seconds)
    raise typer.Exit(outcome.exit_code)


@app.command("plan-model", context_settings={"ignore_unknown_options": True})
def plan_model(
    image: Annotated[str, typer.Argument(help="A tag, or a framework of buildspec.yml.")],
    factory: Annotated[str, typer.Argument(metavar="FILE.py:NAME", help="What gives the model and a batch.")],
    options: Annotated[list[str] | None, typer.Argument(metavar="[OPTION]...", help=PLAN_HELP)] = None,
    engine_kind: Annotated[Engine, typer.Option("--engine", help="none: with this machine's Python.")] = Engine.docker,
) -> None:
    """Say what model parallelism would do to a model, and recommend mp_parameters, without training it.

    Memory of each stage, idle time and the partition, from a run on the meta device: a model of any size will do.
    """
    if engine_kind is Engine.none:
        code = planning.run_here(factory, options or [])
    else:
        tag, _ = _image_to_run(image, build=False)
        code = planning.run_in(tag, factory, options or [], console)
    raise typer.Exit(code)


@reports.command("timeline")
def report_timeline(
    paths: Annotated[list[Path], typer.Argument(metavar="FILE|DIRECTORY...", help="What the ranks have recorded.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The page.")] = Path("timeline.html"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Also write the ranks as one Chrome trace, beside the page.")
    ] = False,
) -> None:
    """Show when the ranks of a job computed, communicated and waited, and who was late."""
    analysis, written = timeline.report(paths, output, as_json)
    timeline.show(console, analysis)
    for path in written:
        console.print(f"written {path}", markup=False, soft_wrap=True)


def _image_to_run(name: str, build: bool) -> tuple[str, float | None]:
    """Return the tag that `name` means, and the seconds that building it took; a foreign tag is taken as it is."""
    if not build and ":" in name:
        return name, None
    here, matrix = _open()
    image = matrix.select(name)
    return image.tag, _build(here, matrix, image) if build else None


def _pairs(option: str, words: list[str] | None) -> dict[str, str]:
    pairs = {}
    for word in words or ():
        key, equals, value = word.partition("=")
        if not key or not equals:
            raise UsageError(f"{option} {word}: expected NAME=VALUE, such as {option} name=value")
        if key in pairs:
            raise UsageError(f"{option} {key}: given twice")
        pairs[key] = value
    return pairs


def _json_object(option: str, text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise UsageError(f'{option}: not JSON: {error}. Example: \'{{"mpi": {{"enabled": true}}}}\'') from error
    if not isinstance(document, dict):
        raise UsageError(f"{option}: expected a JSON object, found {text}")
    return document
