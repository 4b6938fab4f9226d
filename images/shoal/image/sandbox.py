"""Runs a command in a locked-down container of an image that is not trusted, and returns its output.

The command runs as an unprivileged user, without a network, without capabilities or a way to gain them, and on a
read-only file system. Volumes of the image are empty. It may have 128 processes and 2 GiB of memory. Its time
has no limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import docker
import docker.errors
from docker.types import LogConfig

from shoal.docker_client import containers
from shoal.docker_client.images import read_config
from shoal.errors import ImageError
from shoal.limits import MOST_PROBED, parse_json

_SHOWN_LINES = 100  # of a command that failed
NOBODY = "65534:65534"
# The working directory has no Python modules of the image. The log is kept whole. The client's proxies are not passed
# on, because they would look like the image's own.
_SETTINGS: dict[str, Any] = {
    "user": NOBODY,
    "cap_drop": ["ALL"],
    "security_opt": ["no-new-privileges"],
    "read_only": True,
    "pids_limit": 128,
    "mem_limit": "2g",
    "memswap_limit": "2g",
    "working_dir": "/",
    "network_mode": "none",
    "log_config": LogConfig(type=LogConfig.types.JSON, config={"max-size": "1g"}),
    "use_config_proxy": False,
}


def run_probe(client: docker.DockerClient, tag: str, program: Path) -> dict[str, Any]:
    """Runs one of our Python programs with the image's Python, and returns the JSON object that it prints.

    Args:
        program: The program; it may use the standard library only.

    Raises:
        ImageError: If Docker lacks the image, it has no Python, or the output is not a JSON object.
    """
    output = run_command(client, tag, ["python3", "-B", "-c", program.read_text()])
    try:
        found = parse_json(output.encode())
    except ValueError as error:
        raise ImageError(
            f"{tag}: the output of its Python is not JSON: {error}. Fix: do not trust this image"
        ) from None
    if not isinstance(found, dict):
        raise ImageError(f"{tag}: the output of its Python is not a JSON object. Fix: do not trust this image")
    return found


def run_command(client: docker.DockerClient, tag: str, command: Sequence[str]) -> str:
    """Runs a command in a container of the image, which is removed, and returns its standard output.

    Raises:
        ImageError: If Docker lacks the image, it has no such command, or the command fails.
    """
    try:
        image = client.images.get(tag)
    except docker.errors.ImageNotFound:
        raise ImageError(f"{tag}: Docker does not have this image. Fix: build it or pull it") from None
    program, *arguments = command
    label = containers.unique_name("inside")
    settings = _SETTINGS | {"entrypoint": [program], "labels": {containers.JOB_LABEL: label}}
    # Docker would make a volume that can be written for each that the image names.
    settings["tmpfs"] = dict.fromkeys(read_config(image).get("Volumes") or (), "ro")
    with containers.remove_at_end(client, label):
        container = containers.create_container(client, tag, arguments, settings)
        try:
            container.start()
        except docker.errors.APIError as error:
            name = "Python" if program.startswith("python") else program
            raise ImageError(f"{tag}: cannot be inspected, as it has no {name}: {error.explanation}") from None
        if container.wait()["StatusCode"]:
            output = container.logs(tail=_SHOWN_LINES).decode(errors="replace")
            raise ImageError(f"{tag}: cannot be inspected:\n{output}")
        found = bytearray()
        for chunk in container.logs(stderr=False, stream=True):
            found += chunk
            if len(found) > MOST_PROBED:
                raise ImageError(
                    f"{tag}: the output of its {program} has more than {MOST_PROBED:,} bytes."
                    " Fix: do not trust this image"
                )
        return found.decode(errors="replace")
