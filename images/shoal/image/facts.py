"""Facts about an image: what is installed, read by a program in one of its containers.

The image is not trusted. The program runs as an unprivileged user, without a network, without capabilities or a way to
gain them, and on a read-only file system. Volumes of the image are empty. It may have 128 processes and 2 GiB of
memory. Its time has no limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import docker
import docker.errors
import pydantic
from docker.types import LogConfig

from shoal.docker_client import containers
from shoal.docker_client.images import read_config, read_labels
from shoal.errors import ImageError
from shoal.limits import MOST_PROBED, parse_json

_PROBE = Path(__file__).with_name("probe.py")


class Distribution(pydantic.BaseModel):
    """A Python distribution."""

    name: str
    version: str
    licence: str
    """An SPDX expression or free text; empty if the metadata has none."""
    homepage: str


class Package(pydantic.BaseModel):
    """A Debian package."""

    name: str
    version: str
    architecture: str
    source: str
    licence: str
    """The licences in its copyright file, joined by AND; empty if that file is free text."""


class ImageFacts(pydantic.BaseModel):
    """The facts that Docker and a container of an image report."""

    tag: str
    id: str
    """The image's digest."""
    created: str
    """In ISO 8601."""
    bytes: int
    labels: dict[str, str]
    system: dict[str, str]
    """The content of /etc/os-release."""
    python: str
    machine: str
    """The processor architecture."""
    distributions: tuple[Distribution, ...]
    packages: tuple[Package, ...]
    commands: dict[str, str]
    """The first line that each command prints about its version."""
    environment: dict[str, str]

    @property
    def versions(self) -> Mapping[str, str]:
        """The versions of the Python distributions, by name."""
        return {distribution.name: distribution.version for distribution in self.distributions}


def read_facts(client: docker.DockerClient, tag: str) -> ImageFacts:
    """Reads the facts of an image, in a container without a network.

    Facts that Docker knows are taken from Docker, because an image may lie about them.

    Raises:
        ImageError: If Docker lacks the image, it has no Python, or its answer is malformed.
    """
    found = run_probe(client, tag, _PROBE)
    image = client.images.get(tag)
    known = {
        "tag": tag,
        "id": image.id,
        "created": image.attrs["Created"],
        "bytes": image.attrs["Size"],
        "labels": read_labels(image),
    }
    try:
        return ImageFacts.model_validate(found | known)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise ImageError(
            f"{tag}: the output of its Python is malformed: {field!r}: {first['msg']}. Fix: do not trust this image"
        ) from None


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
            raise ImageError(
                f"{tag}: cannot be inspected, as it has no {name}: {error.explanation}."
                " Fix: name an image of Debian with Python"
            ) from None
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
