"""`shoal plan-model`: runs the model-parallel library's `plan` where the library is, in an image or here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import docker.types
from rich.console import Console

from shoal import docker_client
from shoal.docker_client import containers
from shoal.errors import UsageError

_COMMAND = ("-m", "smdistributed.modelparallel", "plan")
_ROOM = "/opt/plan"


def run_here(factory: str, options: Sequence[str], *, as_json: bool) -> int:
    """Run it with this Python. Returns its exit code."""
    return subprocess.run([sys.executable, *_command(factory, options, as_json)], check=False).returncode


def _command(factory: str, options: Sequence[str], as_json: bool) -> list[str]:
    return [*_COMMAND, factory, *options, *(["--json"] if as_json else [])]


def run_in(image: str, factory: str, options: Sequence[str], console: Console, *, as_json: bool) -> int:
    """Run it in a container of `image`, without a network. The directory that the file is in is mounted, read-only.

    With `as_json`, its standard output is a document, which is printed whole at the end; `console` has the rest.
    Returns its exit code. Raises `UsageError` when the file is not there, `DockerError` without an engine or image.
    """
    where, _, name = factory.rpartition(":")
    path = Path(where)
    if not where or not path.is_file():
        raise UsageError(f"{factory}: expected FILE.py:NAME, a file of this machine and a function in it")
    label = containers.unique_name("plan")
    client = docker_client.connect()
    settings = {
        "entrypoint": ["python"],
        "mounts": [docker.types.Mount(_ROOM, str(path.parent.resolve()), type="bind", read_only=True)],
        "working_dir": _ROOM,
        "network_mode": "none",
        "labels": {containers.JOB_LABEL: label},
    }
    with containers.remove_at_end(client, label):
        container = containers.create_container(
            client, image, _command(f"{path.name}:{name}", options, as_json), settings
        )
        container.start()
        for line in containers.split_lines(container.logs(stream=True, follow=True, stdout=not as_json)):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        code = int(container.wait()["StatusCode"])
        if as_json:
            print(container.logs(stderr=False).decode(errors="replace"), end="")
        return code
