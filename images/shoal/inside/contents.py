"""What a container of an image says is inside."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files

import docker
import docker.errors
import pydantic

from shoal import job
from shoal import run as runner
from shoal.errors import ImageError


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
    """Ask a container of the image, without a network. Raises ImageError where there is no image, or no Python."""
    try:
        image = client.images.get(tag)
    except docker.errors.ImageNotFound:
        raise ImageError(f"{tag}: not on the engine. Build it first: shoal build {tag}") from None
    about = image.attrs
    return Contents.model_validate(
        {
            "tag": tag,
            "id": image.id,
            "created": about["Created"],
            "bytes": about["Size"],
            "labels": image.labels,
            **json.loads(_probe(client, tag)),
        }
    )


def _probe(client: docker.DockerClient, tag: str) -> bytes:
    text = files("shoal.inside").joinpath("probe.py").read_text()
    label = job.unique("inside")
    settings = {"entrypoint": ["python"], "network_mode": "none", "labels": {runner.JOB_LABEL: label}}
    with runner.removing(client, label):
        container = runner.create(client, tag, ["-c", text], settings)
        try:
            container.start()
        except docker.errors.APIError as error:
            raise ImageError(f"{tag}: has no Python to ask: {error.explanation}") from None
        code = container.wait()["StatusCode"]
        if code:
            raise ImageError(f"{tag}: cannot be asked what is inside:\n{container.logs().decode(errors='replace')}")
        output: bytes = container.logs(stderr=False)
        return output
