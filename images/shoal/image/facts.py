"""Facts about an image: what is installed, read by a program in one of its containers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import docker
import pydantic

from shoal.docker_client.images import read_labels
from shoal.errors import ImageError
from shoal.image import sandbox

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
    found = sandbox.run_probe(client, tag, _PROBE)
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
