"""What a container of an image says is inside."""

from __future__ import annotations

from collections.abc import Mapping

import docker
import pydantic

from shoal.errors import ImageError
from shoal.inspection import sandbox


class Distribution(pydantic.BaseModel):
    """A Python distribution. licence: an expression or words; empty where its metadata does not say."""

    name: str
    version: str
    licence: str
    homepage: str


class Package(pydantic.BaseModel):
    """A Debian package. licence: those that its copyright file names, joined by AND; empty where it is free text."""

    name: str
    version: str
    architecture: str
    source: str
    licence: str


class Contents(pydantic.BaseModel):
    """An image. id: its digest. created: ISO 8601. commands: the first line of what each says of its version."""

    tag: str
    id: str
    created: str
    bytes: int
    labels: dict[str, str]
    system: dict[str, str]
    python: str
    machine: str
    distributions: tuple[Distribution, ...]
    packages: tuple[Package, ...]
    commands: dict[str, str]
    environment: dict[str, str]

    @property
    def versions(self) -> Mapping[str, str]:
        """The versions of the Python distributions, by name."""
        return {distribution.name: distribution.version for distribution in self.distributions}


def read(client: docker.DockerClient, tag: str) -> Contents:
    """Ask a container of the image, without a network. Raises ImageError where there is no image, or no Python.

    What the engine knows is taken from it, whatever the image says.
    """
    said = sandbox.ask(client, tag, "probe.py")
    image = client.images.get(tag)
    about = image.attrs
    known = {"tag": tag, "id": image.id, "created": about["Created"], "bytes": about["Size"], "labels": image.labels}
    try:
        return Contents.model_validate(said | known)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise ImageError(f"{tag}: what its Python says is not what was asked: {field!r}: {first['msg']}") from None
