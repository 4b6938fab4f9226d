"""Base images, one for each release of Debian: Debian's own slim image if it can be pulled, else one that is made here.

mmdebstrap makes it from this machine's Debian mirror, with fixed time stamps and a fixed creation time. The same
packages give the same image ID, so builds on it stay cached. The archive is kept in the cache directory, for a Docker
that has lost the image.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import re
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

from shoal.docker_client.archive import add_file
from shoal.docker_client.images import find_image
from shoal.errors import BaseImageError
from shoal.matrix.spec import System
from shoal.network.settings import NetworkSettings
from shoal.sources.packages import SOURCE_DATE_EPOCH

_REGISTRY = "docker.io/library"
REPOSITORY = "shoal-base"
RECIPE_LABEL = "shoal.base.recipe"
_EXAMPLES = "/usr/share/doc/apt/examples"
_OPTIONS = (
    "--variant=minbase",
    "--mode=root",
    "--format=tar",
    # Debian's slim image leaves out the same, except for the copyright files.
    *(
        f"--dpkgopt=path-exclude=/usr/share/{name}/*"
        for name in ("doc", "groff", "info", "linda", "lintian", "locale", "man")
    ),
    "--dpkgopt=path-include=/usr/share/doc/*/copyright",
)
# The image gets the sources that Debian's apt has as an example. This machine's mirror does not appear in it.
_CLEAR = 'rm -rf "$1"/etc/apt/sources.list.d/* "$1"/etc/apt/apt.conf.d/99mmdebstrap'
_OWN_SOURCES = {
    "sources.list": (
        f'grep "^deb " "$1{_EXAMPLES}/sources.list" | sed "s/ contrib.*//" > "$1/etc/apt/sources.list"',
        _CLEAR,
    ),
    "debian.sources": (
        f'{_CLEAR} "$1"/etc/apt/sources.list',
        f'grep -v "^#" "$1{_EXAMPLES}/debian.sources" | sed "s/ contrib.*//"'
        ' > "$1/etc/apt/sources.list.d/debian.sources"',
    ),
}

Say = Callable[[str], None]


@dataclass(frozen=True)
class BaseImage:
    """A base image that Docker has."""

    reference: str
    """The name for FROM."""
    image_id: str
    name: str
    """The name with its registry, if a registry has it."""
    digest: str = ""
    """Of its manifest in the registry; empty if it was not pulled."""

    @property
    def identity(self) -> str:
        """`reference@ID`, with the hexadecimal ID of the image: two images of one name differ in it."""
        return f"{self.reference}@{self.image_id.removeprefix('sha256:')}"


def make_recipe(system: System) -> tuple[str, ...]:
    """Returns mmdebstrap's options and suite for a system, the same on every machine.

    Mirrors and proxies are not among them.
    """
    return (
        *_OPTIONS,
        f"--dpkgopt=path-include={_EXAMPLES}/{system.sources}",
        *(f"--customize-hook={hook}" for hook in _OWN_SOURCES[system.sources]),
        '--customize-hook=rm -f "$1"/etc/resolv.conf "$1"/etc/hostname',
        system.suite,
    )


def recipe_digest(system: System) -> str:
    """Returns the digest in the label of an image that is made by the recipe. The label is used to find it again."""
    return hashlib.sha256("\n".join((*make_recipe(system), SOURCE_DATE_EPOCH)).encode()).hexdigest()[:12]


def find_base(client: docker.DockerClient, system: System) -> BaseImage | None:
    """Returns the system's base image if Docker has one: Debian's, otherwise one made here before.

    Pulls and makes nothing.
    """
    return _find_upstream(client, system) or _find_bootstrapped(client, system)


def is_base_name(name: str, system: System) -> bool:
    """Returns whether only the system's base image can have this name: Debian's, or one made here."""
    made_here = re.fullmatch(rf"{REPOSITORY}:{re.escape(system.suite)}-[0-9a-f]{{12}}", name)
    return made_here is not None or name in (system.upstream, system.upstream.rpartition(":")[2])


def find_base_of(client: docker.DockerClient, tag: str, system: System) -> str:
    """Returns the reference of the base image that an image is built on, by its first layers.

    Raises `BaseImageError` if Docker no longer has the base image.
    """
    layers = client.images.get(tag).attrs["RootFS"]["Layers"]
    for name in (REPOSITORY, system.upstream):
        for listed in client.api.images(name):
            image = find_image(client, listed["Id"])  # another build may have replaced it meanwhile
            if image and layers[: len(lower := image.attrs["RootFS"]["Layers"])] == lower:
                return image.tags[0]
    raise BaseImageError(
        f"{tag}: Docker has no {REPOSITORY} or {system.upstream} that it is built on. Fix: shoal build {tag}"
    )


def provide_base(
    client: docker.DockerClient,
    system: System,
    read_settings: Callable[[], NetworkSettings],
    cache: Path,
    say: Say,
    *,
    pin: str = "",
    newest: bool = False,
) -> BaseImage:
    """Returns the system's base image. If Docker has none, pulls it; if it cannot be pulled, makes it.

    Making it may install mmdebstrap with apt-get, and keeps an archive in `cache`. An image that was pulled by its
    digest gets the usual tag. One that Docker has already is not compared with `pin`.

    Args:
        read_settings: Is called only if the image must be made.
        say: Is called with a line for each step that takes long.
        pin: The digest of the image to pull; empty: the newest. It has no effect if the image is made.
        newest: Whether to pull even if Docker has a base image. If that fails, the present one is returned.

    Raises:
        BaseImageError: If it can neither be pulled nor made, or Docker does not list it after the pull.
    """
    if not newest and (base := find_base(client, system)):
        return base
    upstream = system.upstream
    wanted = f"{upstream.rpartition(':')[0]}@{pin}" if pin else upstream
    try:
        say(f"base: pulling {wanted}")
        image = client.images.pull(wanted)
        if pin:
            image.tag(*upstream.rsplit(":", 1))
    except docker.errors.APIError as error:
        problem = f"base: {upstream} cannot be pulled ({str(error.explanation or error).splitlines()[0][:160]})"
        if newest and (base := find_base(client, system)):
            say(f"{problem}; {base.reference} is here")
            return base
        say(f"{problem}; bootstrapping Debian {system.suite} from this machine's mirror")
        return _bootstrap(client, system, read_settings(), cache, say)
    base = _find_upstream(client, system)
    if base is None:
        raise BaseImageError(f"{upstream} was pulled, but Docker does not list it. Fix: docker pull {upstream}")
    return base


def _find_upstream(client: docker.DockerClient, system: System) -> BaseImage | None:
    image = find_image(client, system.upstream)
    if image is None:
        return None
    # An image that was loaded, not pulled, has no digest of a manifest.
    name = system.upstream.rpartition(":")[0]
    digests = [digest for digest in image.attrs.get("RepoDigests") or () if digest.startswith(f"{name}@")]
    origin = system.upstream if "/" in system.upstream else f"{_REGISTRY}/{system.upstream}"
    return BaseImage(system.upstream, str(image.id), origin, "".join(digests[:1]).partition("@")[2])


def _find_bootstrapped(client: docker.DockerClient, system: System) -> BaseImage | None:
    # Images built on it have its label too; the SDK's `images.list` would ask for each of them.
    images = client.api.images(REPOSITORY, filters={"label": f"{RECIPE_LABEL}={recipe_digest(system)}"})
    tagged = sorted(tag for image in images for tag in image["RepoTags"])
    if not tagged:
        return None
    image = client.images.get(tagged[0])
    return BaseImage(tagged[0], str(image.id), tagged[0])


def _bootstrap(
    client: docker.DockerClient, system: System, settings: NetworkSettings, cache: Path, say: Say
) -> BaseImage:
    """Makes the archive if the cache lacks it, which may install mmdebstrap with apt-get. Raises `BaseImageError`."""
    kept = archive_path(cache, system)
    if not kept.is_file():
        _run_mmdebstrap(system, settings, kept, say)
    with kept.open("rb") as layer, TemporaryFile() as image:
        _write_image(system, layer, image)
        image.seek(0)
        client.images.load(image)
    base = _find_bootstrapped(client, system)
    if base is None:
        raise BaseImageError(
            f"Docker has loaded {kept}, but does not list the image. Fix: remove the file, and build again"
        )
    return base


def _run_mmdebstrap(system: System, settings: NetworkSettings, archive: Path, say: Say) -> None:
    """Installs mmdebstrap if it is missing. Uses this machine's proxies, sources, passwords and CA bundle."""
    _install_mmdebstrap(system, say)
    archive.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=archive.parent, prefix="base-") as name:  # two builds at once do not share a file
        scratch = Path(name)
        (scratch / "ca.crt").write_bytes(settings.ca_bundle or b"")
        lines = [line.rstrip(";") for line in settings.apt_proxies]
        lines += [f'Acquire::https::CAInfo "{scratch}/ca.crt"'] if settings.ca_bundle else []
        sources = settings.select_sources(system.suite)
        if auth := settings.select_auth(sources):
            (scratch / "auth.conf").write_text(auth)
            lines.append(f'Dir::Etc::Netrc "{scratch}/auth.conf"')
        # A file: proxies may have passwords, and every user can read command lines.
        (scratch / "apt.conf").write_text("".join(f"{line};\n" for line in lines))
        command = ["mmdebstrap", f"--aptopt={scratch / 'apt.conf'}", *make_recipe(system), str(scratch / "base.tar")]
        if sources:
            (scratch / "sources.list").write_text("\n".join(sources) + "\n")
            command.append(str(scratch / "sources.list"))
        _run(command, f"mmdebstrap of Debian {system.suite} failed", SOURCE_DATE_EPOCH=SOURCE_DATE_EPOCH)
        (scratch / "base.tar").replace(archive)


def archive_path(cache: Path, system: System) -> Path:
    """Returns where the archive of the system's base image is kept, if one was made here."""
    return cache / f"base-{system.suite}-{recipe_digest(system)}.tar"


def explain_no_bootstrap(system: System) -> str:
    """Returns why this machine cannot make a base image; empty if it can. Starts and installs nothing."""
    if platform.machine() != "x86_64":
        return f"the images are for x86_64 and this machine is {platform.machine()}: no base is made here"
    if os.geteuid() != 0 or not (shutil.which("mmdebstrap") or shutil.which("apt-get")):
        return (
            f"{system.upstream} cannot be pulled and mmdebstrap is not here to make a base. Fix: give Docker a"
            f" {system.upstream} (docker load), or run this as root on Debian or Ubuntu"
        )
    return ""


def _install_mmdebstrap(system: System, say: Say) -> None:
    """Raises `BaseImageError` if this machine cannot make base images, even with mmdebstrap, or if apt-get fails."""
    if reason := explain_no_bootstrap(system):
        raise BaseImageError(reason)
    if shutil.which("mmdebstrap"):
        return
    say("base: installing mmdebstrap with apt-get")
    subprocess.run(["apt-get", "update", "-qq"], capture_output=True, check=False)
    install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "mmdebstrap", "debian-archive-keyring"]
    _run(install, "apt-get cannot install mmdebstrap", DEBIAN_FRONTEND="noninteractive")


def _run(command: list[str], problem: str, **environment: str) -> None:
    """Runs a program. If it fails, raises `BaseImageError` with the end of its standard error."""
    result = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    if result.returncode:
        raise BaseImageError(
            f"{problem} (exit code {result.returncode}):\n{result.stderr.strip()[-2000:]}\n"
            "Fix: check the mirror and the network: shoal doctor"
        )


def _write_image(system: System, layer: BufferedReader, out: IO[bytes]) -> None:
    digest = hashlib.file_digest(layer, "sha256").hexdigest()
    # A fixed date, so that the same layer makes the same image.
    created = datetime.fromtimestamp(int(SOURCE_DATE_EPOCH), UTC).isoformat().replace("+00:00", "Z")
    config = {
        "architecture": "amd64",
        "os": "linux",
        "created": created,
        "config": {"Cmd": ["bash"], "Labels": {RECIPE_LABEL: recipe_digest(system)}},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        "history": [{"created": created, "created_by": f"mmdebstrap {system.suite}"}],
    }
    tag = f"{REPOSITORY}:{system.suite}-{digest[:12]}"
    manifest = [{"Config": "config.json", "RepoTags": [tag], "Layers": ["layer.tar"]}]
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, document in (("config.json", config), ("manifest.json", manifest)):
            add_file(archive, name, io.BytesIO(json.dumps(document).encode()))
        add_file(archive, "layer.tar", layer)
