"""Asks a container of an image: a program of this package runs in it, without a network, and prints JSON."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import docker
import docker.errors
from docker.types import LogConfig

from shoal.engine import containers
from shoal.errors import ImageError

# As root, whatever the image's user may read; away from its modules; with a log that is kept whole; and without the
# proxies of the engine's client, which would look like the image's own.
_SETTINGS: dict[str, Any] = {
    "entrypoint": ["python3", "-B"],
    "user": "0:0",
    "working_dir": "/",
    "network_mode": "none",
    "log_config": LogConfig(type=LogConfig.types.JSON, config={"max-size": "1g"}),
    "use_config_proxy": False,
}


def ask(client: docker.DockerClient, tag: str, program: str) -> Any:
    """Return what a file of this package prints there. Raises ImageError where there is no image, or no Python."""
    try:
        client.images.get(tag)
    except docker.errors.ImageNotFound:
        raise ImageError(f"{tag}: not on the engine. Build or pull it") from None
    text = files("shoal.inside").joinpath(program).read_text()
    label = containers.unique("inside")
    settings = _SETTINGS | {"labels": {containers.JOB_LABEL: label}}
    with containers.removing(client, label):
        container = containers.create(client, tag, ["-c", text], settings)
        try:
            container.start()
        except docker.errors.APIError as error:
            raise ImageError(f"{tag}: has no Python to ask: {error.explanation}") from None
        if container.wait()["StatusCode"]:
            raise ImageError(f"{tag}: cannot be asked what is inside:\n{container.logs().decode(errors='replace')}")
        try:
            return json.loads(container.logs(stderr=False))
        except ValueError as error:
            raise ImageError(f"{tag}: what its Python says is no JSON: {error}") from None
