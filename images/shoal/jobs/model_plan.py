"""Runs `shoal estimate`: the `plan` command of the model-parallel library, in an image or on this machine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import docker.types
from rich.console import Console

from shoal import docker_client
from shoal.clean_text import print_document
from shoal.console import print_line
from shoal.docker_client import containers
from shoal.errors import UsageError

_COMMAND = ("-m", "smdistributed.modelparallel", "plan")
_DIRECTORY = "/opt/plan"


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
