"""Asks a container of an image: a command or a program of this package runs in it and prints.

The image may be anybody's, and its Python is the image's own program. So it runs as nobody, without a network, without
any of the kernel's capabilities and with no way to get one, on a file system that it cannot write to.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import docker
import docker.errors
from docker.types import LogConfig

from shoal.docker_client import containers
from shoal.docker_client.containers import strip_controls
from shoal.errors import ImageError

NOBODY = "65534:65534"
# Away from the modules of the image's user; with a log that is kept whole; and without the proxies of the engine's
# client, which would look like the image's own.
_SETTINGS: dict[str, Any] = {
    "user": NOBODY,
    "cap_drop": ["ALL"],
    "security_opt": ["no-new-privileges"],
    "read_only": True,
    "pids_limit": 128,
    "working_dir": "/",
    "network_mode": "none",
    "log_config": LogConfig(type=LogConfig.types.JSON, config={"max-size": "1g"}),
    "use_config_proxy": False,
}


def ask(client: docker.DockerClient, tag: str, program: str) -> Any:
    """Return what a file of this package prints there. Raises ImageError where there is no image, or no Python."""
    text = files("shoal.inspection").joinpath(program).read_text()
    output = said(client, tag, ["python3", "-B", "-c", text])
    try:
        found = json.loads(output)
    except (ValueError, RecursionError) as error:
        raise ImageError(f"{tag}: what its Python says is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ImageError(f"{tag}: what its Python says is no JSON object")
    return found


def said(client: docker.DockerClient, tag: str, command: Sequence[str]) -> str:
    """Return what a command prints there. Raises ImageError where there is no image or no such command, or it fails."""
    try:
        client.images.get(tag)
    except docker.errors.ImageNotFound:
        raise ImageError(f"{tag}: not on the engine. Build or pull it") from None
    program, *arguments = command
    label = containers.unique_name("inside")
    settings = _SETTINGS | {"entrypoint": [program], "labels": {containers.JOB_LABEL: label}}
    with containers.remove_at_end(client, label):
        container = containers.create_container(client, tag, arguments, settings)
        try:
            container.start()
        except docker.errors.APIError as error:
            name = "Python" if program.startswith("python") else program
            raise ImageError(f"{tag}: has no {name} to ask: {error.explanation}") from None
        if container.wait()["StatusCode"]:
            raise ImageError(
                f"{tag}: cannot be asked what is inside:\n{strip_controls(container.logs().decode(errors='replace'))}"
            )
        return container.logs(stderr=False).decode(errors="replace")
