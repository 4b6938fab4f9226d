"""Finds images that Docker has, their scripts and users, explains missing ones, and removes replaced ones."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import docker
import docker.errors
import docker.models.images
import requests

from shoal.docker_client import containers
from shoal.errors import ImageError, UsageError, did_you_mean
from shoal.matrix.spec import BuildSpec

SCRIPT_VARIABLES = frozenset({"SAGEMAKER_PROGRAM", "SAGEMAKER_TRAINING_MODULE"})
"""The variables in which `train` finds the script of a job."""

_NO_PROGRAM = re.compile(r'exec: "(?P<program>[^"]+)": (?P<problem>.+?)(?:: unknown)?$')


def find_image(client: docker.DockerClient, tag: str) -> docker.models.images.Image | None:
    """Returns the image with the tag or ID; None if Docker does not have it. Pulls nothing."""
    try:
        return client.images.get(tag)
    except docker.errors.ImageNotFound:
        return None


def describe_missing(client: docker.DockerClient, tag: str, matrix: BuildSpec | None) -> str:
    """Returns the error text for an image that Docker does not have: how to build it, or similar tags.

    Only an image of the matrix can be built.
    """
    ours = [image.tag for image in matrix.images] if matrix else []
    if tag in ours:
        return f"{tag}: not built yet. Fix: shoal build {tag}"
    known = [
        *(matrix.defaults if matrix else ()),
        *ours,
        *(tag for of in client.api.images() for tag in of["RepoTags"] or ()),
    ]
    hint = did_you_mean(tag, known, limit=3)
    return f"{tag}: no such image in Docker or in buildspec.yml.{hint} Fix: build or pull it; docker images lists them."


def read_config(image: docker.models.images.Image) -> dict[str, Any]:
    """Returns the configuration of an image; empty if the image has none."""
    return dict(image.attrs.get("Config") or {})


def read_labels(image: docker.models.images.Image) -> dict[str, str]:
    """Returns the labels of an image; none if the image has no configuration."""
    try:
        return image.labels
    except AttributeError:  # the SDK's, for an image without a configuration
        return {}


def has_script(image: docker.models.images.Image) -> bool:
    """Returns whether an image names the script of a job, or has an entry point, which gets the word `train`."""
    config = read_config(image)
    variables = {variable.partition("=")[0] for variable in config.get("Env") or ()}
    return bool(SCRIPT_VARIABLES & variables or config.get("Entrypoint"))


def remove_replaced(client: docker.DockerClient, image_id: str) -> None:
    """Removes an image that lost its tag to a new one, unless another tag or a container still uses it.

    An image that is gone already is ignored.
    """
    try:
        if not client.images.get(image_id).tags:
            client.images.remove(image_id)
    except docker.errors.ImageNotFound:
        return
    except docker.errors.APIError as error:
        if error.status_code != requests.codes.conflict:
            raise


def explain_start(image: str, error: docker.errors.APIError, environment: Mapping[str, str]) -> Exception:
    """Returns the error for a container that did not start: an `ImageError` if it has no such program.

    If the user has set PATH in the environment, it is a `UsageError`.
    """
    if not (match := _NO_PROGRAM.search(str(error.explanation))):
        return error
    program = match["program"]
    if program != "train":
        return ImageError(
            f"{image}: its ENTRYPOINT {program} cannot be started: {match['problem']}. Fix: correct it in the"
            " Dockerfile, or remove ENTRYPOINT"
        )
    if path := environment.get("PATH"):
        return UsageError(
            f"--env PATH={path}: no program `train` there in {image}. Fix: leave it out, or add the directories of the"
            " image's own PATH (docker inspect)"
        )
    return ImageError(
        f"{image}: no program `train` on its PATH that its user can execute, so it is not a training image. Fix: use an"
        " image of `shoal list`, or extend one of them (docs/recipes.md)"
    )


_NO_ID = -1


class Owner(NamedTuple):
    """The numbers of a user and a group. Why files get them: docs/decisions/user-of-the-container.md."""

    uid: int = 0
    gid: int = 0


ROOT = Owner()


def find_owner(client: docker.DockerClient, image: str, identity: str) -> Owner:
    """Returns who runs the processes in containers of an image: root, or the user of its `USER`.

    As Docker does, it looks for names, and for the group of a user, in the image's own files. So it makes a container
    with the label `JOB_LABEL=identity`, which does not start, and removes it. A name that is not there counts as root:
    Docker refuses it when the container starts.
    """
    found = find_image(client, image)
    user = str(read_config(found).get("User") or "") if found else ""
    if user in ("", "0", "root", "0:0", "root:root"):
        return ROOT
    container = containers.create_container(client, image, ["true"], {"labels": {containers.JOB_LABEL: identity}})
    try:
        files = (containers.read_file(container, path) or b"" for path in ("/etc/passwd", "/etc/group"))
        accounts, groups = (content.decode(errors="replace").split("\n") for content in files)
        return resolve_user(user, accounts, groups)
    finally:
        container.remove(force=True, v=True)


def resolve_user(user: str, accounts: Sequence[str], groups: Sequence[str]) -> Owner:
    """Returns the numbers of an image's `USER`, such as `trainer`, `1000` or `1000:100`, as Docker finds them.

    Args:
        user: The value of `USER`.
        accounts: The lines of /etc/passwd.
        groups: The lines of /etc/group.
    """
    name, _, group = user.partition(":")
    fields = _find_entry(name, accounts)
    uid = _parse_id(fields[2] if fields else name or "0")
    gid = _parse_id(fields[3]) if len(fields) > 3 else 0
    if group:
        found = _find_entry(group, groups)
        gid = _parse_id(found[2] if found else group)
    return ROOT if _NO_ID in (uid, gid) else Owner(uid, gid)


def _find_entry(name: str, lines: Sequence[str]) -> list[str]:
    for line in lines:
        fields = line.split(":")
        if len(fields) > 2 and (fields[0] == name or (name.isdecimal() and fields[2] == name)):
            return fields
    return []


def _parse_id(text: str) -> int:
    is_number = text.isascii() and text.isdecimal() and len(text) <= 10
    return int(text) if is_number and int(text) < 2**31 else _NO_ID
