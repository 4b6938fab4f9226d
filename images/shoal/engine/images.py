"""Images on the engine."""

from __future__ import annotations

import docker
import docker.errors
import docker.models.images
import requests


def find(client: docker.DockerClient, tag: str) -> docker.models.images.Image | None:
    """Return the engine's image of that tag, or None."""
    try:
        return client.images.get(tag)
    except docker.errors.ImageNotFound:
        return None


def remove_replaced(client: docker.DockerClient, image_id: str) -> None:
    """Remove the image that lost its tag to a new one, unless another tag or a container still holds it."""
    try:
        if not client.images.get(image_id).tags:
            client.images.remove(image_id)
    except docker.errors.ImageNotFound:
        return
    except docker.errors.APIError as error:
        if error.status_code != requests.codes.conflict:
            raise
