"""The user of an image's containers: who owns the files that are copied into them.

Why that is so: docs/decisions/user-of-the-container.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import docker

from shoal.docker_client import containers, images

_NO_ID = -1


class Owner(NamedTuple):
    """The numbers of a user and a group."""

    uid: int = 0
    gid: int = 0


ROOT = Owner()


def find_owner(client: docker.DockerClient, image: str, identity: str) -> Owner:
    """Returns who runs the processes in containers of an image: root, or the user of its `USER`.

    As Docker does, it looks for names, and for the group of a user, in the image's own files. So it makes a container
    with the label `JOB_LABEL=identity`, which does not start, and removes it. A name that is not there counts as root:
    Docker refuses it when the container starts.
    """
    found = images.find_image(client, image)
    user = str(images.read_config(found).get("User") or "") if found else ""
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
