"""The rows of `shoal list`: an image's axes, the frameworks that it is the default of, and whether Docker has it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import docker

from shoal.docker_client.images import find_image
from shoal.matrix.spec import Axes, BuildSpec, ImageSpec


@dataclass(frozen=True)
class ListedImage:
    """An image of the matrix. `unknown`: Docker does not answer."""

    tag: str
    framework: str
    version: str
    device: str
    python: str
    cuda: str | None
    os: str
    variant: str
    extends: str | None
    default_for: tuple[str, ...]
    state: Literal["built", "not built", "unknown"]
    image_id: str | None = None


def list_images(
    matrix: BuildSpec, images: Iterable[ImageSpec], client: docker.DockerClient | None
) -> Iterator[ListedImage]:
    """Yields a row for each image; without a client, whether it is built is unknown."""
    for image in images:
        found = find_image(client, image.tag) if client else None
        axes = image.model_dump(include={*Axes.model_fields, "extends"})
        default_for = tuple(name for name, tag in matrix.defaults.items() if tag == image.tag)
        state: Literal["built", "not built", "unknown"] = "built" if found else "not built"
        yield ListedImage(
            tag=image.tag,
            default_for=default_for,
            state=state if client else "unknown",
            image_id=str(found.id) if found else None,
            **axes,
        )
