"""What `shoal list` tells of an image: its axes, the framework whose default it is, and whether the engine has it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import docker

from shoal.docker_client.images import find
from shoal.matrix.spec import Axes, BuildSpec, ImageSpec


@dataclass(frozen=True)
class Listed:
    """An image of the matrix; its `image_id` is that on the engine. `unknown`: no engine answers."""

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


def listed(matrix: BuildSpec, images: Iterable[ImageSpec], client: docker.DockerClient | None) -> Iterator[Listed]:
    """Yield what there is to tell of each image; without a client, whether it is built is unknown."""
    for image in images:
        found = find(client, image.tag) if client else None
        axes = image.model_dump(include={*Axes.model_fields, "extends"})
        default_for = tuple(name for name, tag in matrix.defaults.items() if tag == image.tag)
        state: Literal["built", "not built", "unknown"] = "built" if found else "not built"
        yield Listed(
            tag=image.tag,
            default_for=default_for,
            state=state if client else "unknown",
            image_id=str(found.id) if found else None,
            **axes,
        )
