"""The oracle: images with the stock toolkit instead of our own, built from our images and kept by content.

    python tests/conformance/oracle.py IMAGE ...     build missing images, and print the tags

The machine's package mirrors, pip configuration and CA bundle serve a first stage, of which only the packages are kept.
The classic builder is enough for that, so any version of Docker will do.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import docker.errors
import requests

from shoal import docker_client
from shoal.docker_client import archive
from shoal.errors import BuildError
from shoal.matrix import project
from shoal.matrix.spec import BuildSpec, ImageSpec, load
from shoal.network.settings import read_network_settings

RECIPE = Path(__file__).with_name("image")
REPOSITORY = "shoal-oracle"
_STAGE = {"label": "shoal.oracle.stage=parts", "dangling": True}
_LAST_WORDS = 30


def ensure(client: docker.DockerClient, spec: BuildSpec, *names: str) -> list[str]:
    """Returns the tags of the stock toolkit's images on top of these images, which exist. Raises `BuildError`.

    The packages are gathered in the first of them. A tag contains a hash of all inputs: an image is never older than
    its inputs.
    """
    parents = [spec.select(name) for name in names]
    wanted = {_tag(client, parent): parent for parent in parents}
    missing = {tag: parent for tag, parent in wanted.items() if not client.images.list(tag)}
    for tag, parent in missing.items():
        older = client.images.list(f"{REPOSITORY}:{parent.directory}-*")
        _build(client, tag, parent, parents[0])
        _remove(client, older)
    if missing:
        _remove(client, client.images.list(filters=_STAGE))
    return list(wanted)


def _tag(client: docker.DockerClient, parent: ImageSpec) -> str:
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(RECIPE.iterdir())))
    attributes = client.images.get(parent.tag).attrs
    # The last layer is our toolkit, which the oracle takes out again.
    facts = [attributes["RootFS"]["Layers"][:-1], attributes["Config"]["Env"], attributes["Config"]["Cmd"]]
    digest.update(json.dumps(facts).encode())
    return f"{REPOSITORY}:{parent.directory}-{digest.hexdigest()[:12]}"


def _build(client: docker.DockerClient, tag: str, parent: ImageSpec, parts_parent: ImageSpec) -> None:
    host = read_network_settings()
    files: dict[str, bytes | Path] = {path.name: path for path in RECIPE.iterdir()}
    files |= {f"machine/{name}": content for name, content in host.build_files(parent.system.suite).items()}
    arguments = {
        "PARENT": parent.tag,
        "PARTS_PARENT": parts_parent.tag,
        "TRAINING_MODULE": f"sagemaker_{parent.framework}_container.training:main",
        **dict(host.proxies),
    }
    with io.BytesIO() as sent:
        archive.write_tar(files, sent)
        sent.seek(0)
        answer = client.api.build(
            fileobj=sent, custom_context=True, tag=tag, buildargs=arguments, rm=True, forcerm=True, decode=True
        )
        _finish(tag, answer)


def _finish(tag: str, answer: Iterator[dict[str, Any]]) -> None:
    lines: list[str] = []
    for entry in answer:
        lines += str(entry.get("stream", "")).splitlines()
        if "error" in entry:
            raise BuildError("\n".join([f"{tag}: {entry['error']}", *lines[-_LAST_WORDS:]]))


def _remove(client: docker.DockerClient, images: list[Any]) -> None:
    """Removes images that are not needed any more: oracles of older parents, and the stage for this machine."""
    for image in images:
        try:
            client.images.remove(image.id, force=True)
        except docker.errors.APIError as error:  # a container runs from it
            if error.status_code != requests.codes.conflict:
                raise


def main(names: list[str]) -> int:
    if not names:
        print("usage: python tests/conformance/oracle.py IMAGE ...", file=sys.stderr)
        return 2
    spec = load(project.find(Path(__file__)).buildspec)
    print("\n".join(ensure(docker_client.connect(), spec, *names)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
