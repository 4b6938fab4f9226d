"""The image that all others stand on: Debian's own slim image where it can be pulled, else the same made here.

One made here is bootstrapped by mmdebstrap from this machine's Debian mirror, with fixed time stamps, and loaded with a
fixed creation time: the same packages give the same image ID, so builds on top of it stay cached. The archive is kept
in the cache directory; an engine that lost the image gets it back from there.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from io import BufferedReader
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO

import docker
import docker.errors

from shoal.errors import BaseImageError
from shoal.host.machine import SUITE, Machine
from shoal.sources.wheels import SOURCE_DATE_EPOCH

UPSTREAM = f"debian:{SUITE}-slim"
REPOSITORY = "shoal-base"
RECIPE_LABEL = "shoal.base.recipe"
_KEEP = "/usr/share/doc/apt/examples/sources.list"
_RECIPE = (
    "--variant=minbase",
    "--mode=root",
    "--format=tar",
    # What debian's slim image leaves out, except the copyright files.
    *(
        f"--dpkgopt=path-exclude=/usr/share/{name}/*"
        for name in ("doc", "groff", "info", "linda", "lintian", "locale", "man")
    ),
    "--dpkgopt=path-include=/usr/share/doc/*/copyright",
    f"--dpkgopt=path-include={_KEEP}",
    # The image's own sources are the ones that Debian's apt gives as its example: no word of this machine's mirror.
    f'--customize-hook=grep "^deb " "$1{_KEEP}" | sed "s/ contrib.*//" > "$1/etc/apt/sources.list"',
    '--customize-hook=rm -rf "$1"/etc/apt/sources.list.d/* "$1"/etc/apt/apt.conf.d/99mmdebstrap',
    '--customize-hook=rm -f "$1"/etc/resolv.conf "$1"/etc/hostname',
    SUITE,
)
RECIPE = hashlib.sha256("\n".join((*_RECIPE, SOURCE_DATE_EPOCH)).encode()).hexdigest()[:12]

Say = Callable[[str], None]


@dataclass(frozen=True)
class BaseImage:
    """The base: the reference for FROM, the engine's image ID, and where it came from."""

    reference: str
    image_id: str
    origin: str

    @property
    def identity(self) -> str:
        return f"{self.reference}@{self.image_id.removeprefix('sha256:')}"


def find(client: docker.DockerClient) -> BaseImage | None:
    """Return the base image that the engine has: Debian's, else one bootstrapped before."""
    return _upstream(client) or _bootstrapped(client)


def ensure(client: docker.DockerClient, machine: Callable[[], Machine], cache: Path, say: Say) -> BaseImage:
    """Return the base image, making it when the engine has none. Raises `BaseImageError`.

    Order: Debian's image on the engine, one bootstrapped before, a pull, a bootstrap. `machine` is called only for the
    last.
    """
    if base := find(client):
        return base
    try:
        say(f"base: pulling {UPSTREAM}")
        client.images.pull(UPSTREAM)
    except docker.errors.APIError as error:
        say(
            f"base: {UPSTREAM} cannot be pulled ({_reason(error)});"
            f" bootstrapping Debian {SUITE} from this machine's mirror"
        )
        return _bootstrap(client, machine(), cache, say)
    base = _upstream(client)
    if base is None:
        raise BaseImageError(f"{UPSTREAM} was pulled, but the engine does not list it. Try: docker pull {UPSTREAM}")
    return base


def _reason(error: docker.errors.APIError) -> str:
    return str(error.explanation or error).splitlines()[0][:160]


def _upstream(client: docker.DockerClient) -> BaseImage | None:
    try:
        image = client.images.get(UPSTREAM)
    except docker.errors.ImageNotFound:
        return None
    digests = image.attrs.get("RepoDigests") or [image.id]
    return BaseImage(UPSTREAM, str(image.id), f"{UPSTREAM} {digests[0]}")


def _bootstrapped(client: docker.DockerClient) -> BaseImage | None:
    # Images built on it have its label too; the SDK's `images.list` would ask for each of them.
    images = client.api.images(REPOSITORY, filters={"label": f"{RECIPE_LABEL}={RECIPE}"})
    tagged = sorted(tag for image in images for tag in image["RepoTags"])
    if not tagged:
        return None
    image = client.images.get(tagged[0])
    return BaseImage(tagged[0], str(image.id), f"Debian {SUITE} bootstrapped by mmdebstrap, {tagged[0]}")


def _bootstrap(client: docker.DockerClient, machine: Machine, cache: Path, say: Say) -> BaseImage:
    kept = kept_archive(cache)
    if not kept.is_file():
        _run_mmdebstrap(machine, kept, say)
    with kept.open("rb") as layer, TemporaryFile() as image:
        _write_image(layer, image)
        image.seek(0)
        client.images.load(image)
    base = _bootstrapped(client)
    if base is None:
        raise BaseImageError(f"the engine took {kept}, but does not list the image")
    return base


def _run_mmdebstrap(machine: Machine, archive: Path, say: Say) -> None:
    _need_mmdebstrap(say)
    archive.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=archive.parent, prefix="base-") as name:  # two builds at once do not share a file
        scratch = Path(name)
        (scratch / "ca.crt").write_bytes(machine.ca_bundle or b"")
        options = [f"--aptopt={line.rstrip(';')}" for line in machine.apt_proxies]
        options += [f'--aptopt=Acquire::https::CAInfo "{scratch}/ca.crt"'] if machine.ca_bundle else []
        command = ["mmdebstrap", *options, *_RECIPE, str(scratch / "base.tar")]
        if machine.apt_sources:
            (scratch / "sources.list").write_text("\n".join(machine.apt_sources) + "\n")
            command.append(str(scratch / "sources.list"))
        environment = os.environ | {"SOURCE_DATE_EPOCH": SOURCE_DATE_EPOCH}
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if result.returncode:
            raise BaseImageError(f"mmdebstrap exited {result.returncode}:\n{result.stderr.strip()[-2000:]}")
        (scratch / "base.tar").replace(archive)


def kept_archive(cache: Path) -> Path:
    """Return where the base image that was bootstrapped last is kept, if one was."""
    return cache / f"base-{SUITE}-{RECIPE}.tar"


def obstacle() -> str:
    """Return why no base image can be bootstrapped on this machine; empty where one can."""
    if platform.machine() != "x86_64":
        return f"the images are for x86_64 and this machine is {platform.machine()}: no base is made here"
    if os.geteuid() != 0 or not (shutil.which("mmdebstrap") or shutil.which("apt-get")):
        return (
            f"{UPSTREAM} cannot be pulled and mmdebstrap is not here to make a base. What to do: give the engine a"
            f" {UPSTREAM} (docker load), or run this as root on Debian or Ubuntu"
        )
    return ""


def _need_mmdebstrap(say: Say) -> None:
    if reason := obstacle():
        raise BaseImageError(reason)
    if shutil.which("mmdebstrap"):
        return
    say("base: installing mmdebstrap with apt-get")
    for command in (
        ["update", "-qq"],
        ["install", "-y", "-qq", "--no-install-recommends", "mmdebstrap", "debian-archive-keyring"],
    ):
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        result = subprocess.run(["apt-get", *command], env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        raise BaseImageError(f"apt-get cannot install mmdebstrap:\n{result.stderr.strip()[-2000:]}")


def _write_image(layer: BufferedReader, out: IO[bytes]) -> None:
    """Write the `docker load` form of a one-layer image of the file system archive `layer`."""
    digest = hashlib.file_digest(layer, "sha256").hexdigest()
    created = datetime.fromtimestamp(int(SOURCE_DATE_EPOCH), UTC).isoformat().replace("+00:00", "Z")
    config = {
        "architecture": "amd64",
        "os": "linux",
        "created": created,
        "config": {"Cmd": ["bash"], "Labels": {RECIPE_LABEL: RECIPE}},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        "history": [{"created": created, "created_by": f"mmdebstrap {SUITE}"}],
    }
    manifest = [{"Config": "config.json", "RepoTags": [f"{REPOSITORY}:{SUITE}-{digest[:12]}"], "Layers": ["layer.tar"]}]
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, document in (("config.json", config), ("manifest.json", manifest)):
            content = json.dumps(document).encode()
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
        entry = tarfile.TarInfo("layer.tar")
        entry.size = layer.seek(0, os.SEEK_END)
        layer.seek(0)
        archive.addfile(entry, layer)
