"""The command `estimate`: runs the `plan` command of the model-parallel library, in an image or on this machine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import docker.types
import typer
from rich.console import Console

from shoal import docker_client
from shoal.clean_text import print_document
from shoal.commands.common import (
    RUN,
    AsJson,
    Image,
    app,
    progress_console,
    resolve_tag,
)
from shoal.commands.script import Local, RunEngine, choose_engine
from shoal.console import print_line
from shoal.docker_client import containers
from shoal.errors import UsageError

_UNKNOWN_OPTIONS = {"ignore_unknown_options": True}
_PLAN_HELP = "--mp-parameters JSON, --devices N, --memory GIB, --optimizer sgd|momentum|adam."
_COMMAND = ("-m", "smdistributed.modelparallel", "plan")
_DIRECTORY = "/opt/plan"


@app.command("estimate", rich_help_panel=RUN, epilog="More: docs/modelparallel.md", context_settings=_UNKNOWN_OPTIONS)
def plan_model(
    image: Image,
    factory: Annotated[str, typer.Argument(metavar="FILE.py:NAME", help="Function that returns (model, batch).")],
    options: Annotated[list[str] | None, typer.Argument(metavar="[OPTION]...", help=_PLAN_HELP)] = None,
    engine: Annotated[
        RunEngine | None,
        typer.Option("--engine", help="none: use this machine's Python, without Docker. Default: docker."),
    ] = None,
    local: Local = False,
    as_json: AsJson = False,
) -> None:
    """Estimate how model parallelism would split a model, and recommend mp_parameters. Trains nothing.

    Reports memory per stage, idle time and the partition. Models may have any size, as they run on the meta device.

    Example: shoal estimate pytorch model.py:make --memory 16
    """
    if choose_engine(engine, local) is RunEngine.none:
        code = run_locally(factory, options or [], as_json=as_json)
    else:
        tag, progress = resolve_tag(image), progress_console(as_json)
        code = run_in_container(tag, factory, options or [], progress, as_json=as_json)
    raise typer.Exit(code)


def run_locally(factory: str, options: Sequence[str], *, as_json: bool) -> int:
    """Runs the plan command with this Python, on this standard output, and returns its exit code."""
    return subprocess.run([sys.executable, *_arguments(factory, options, as_json)], check=False).returncode


def run_in_container(image: str, factory: str, options: Sequence[str], console: Console, *, as_json: bool) -> int:
    """Runs the plan command in a container without a network, and returns its exit code.

    Args:
        factory: `FILE.py:NAME`. The file's directory is mounted read-only.
        options: Further arguments of the plan command.
        console: The console for its output; with `as_json`, for its standard error only.
        as_json: Prints its standard output, one JSON document, when it has ended.

    Raises:
        UsageError: If there is no such file.
        DockerError: If Docker does not answer, or lacks the image.
    """
    file, _, name = factory.rpartition(":")
    path = Path(file)
    if not file or not path.is_file():
        raise UsageError(
            f"{factory}: expected FILE.py:NAME, an existing file and a function in it. Fix: such as model.py:make"
        )
    label = containers.unique_name("plan")
    client = docker_client.connect()
    settings = {
        "entrypoint": ["python"],
        "mounts": [docker.types.Mount(_DIRECTORY, str(path.parent.resolve()), type="bind", read_only=True)],
        "working_dir": _DIRECTORY,
        "network_mode": "none",
        "labels": {containers.JOB_LABEL: label},
    }
    with containers.remove_at_end(client, label):
        container = containers.create_container(
            client, image, _arguments(f"{path.name}:{name}", options, as_json), settings
        )
        container.start()
        for line in containers.split_lines(container.logs(stream=True, follow=True, stdout=not as_json)):
            print_line(line, console)
        code = int(container.wait()["StatusCode"])
        if as_json:
            print_document(container.logs(stderr=False).decode(errors="replace"), end="")
        return code


def _arguments(factory: str, options: Sequence[str], as_json: bool) -> list[str]:
    return [*_COMMAND, factory, *options, *(["--json"] if as_json else [])]
