"""What images stand on, one for each system: Debian's own slim image where it can be pulled, else the same made here.

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
    # What debian's slim image leaves out, except the copyright files.
    *(
        f"--dpkgopt=path-exclude=/usr/share/{name}/*"
        for name in ("doc", "groff", "info", "linda", "lintian", "locale", "man")
    ),
    "--dpkgopt=path-include=/usr/share/doc/*/copyright",
)
# The image's own sources are the ones that Debian's apt gives as its example: no word of this machine's mirror.
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
    """The base: the reference for FROM and the engine's image ID; its name with the registry that has it, where one
    does, and the digest of its manifest there.
    """

    reference: str
    image_id: str
    name: str
    digest: str = ""

    @property
    def identity(self) -> str:
        return f"{self.reference}@{self.image_id.removeprefix('sha256:')}"


def recipe(system: System) -> tuple[str, ...]:
    """Return mmdebstrap's options and suite."""
    return (
        *_OPTIONS,
        f"--dpkgopt=path-include={_EXAMPLES}/{system.sources}",
        *(f"--customize-hook={hook}" for hook in _OWN_SOURCES[system.sources]),
        '--customize-hook=rm -f "$1"/etc/resolv.conf "$1"/etc/hostname',
        system.suite,
    )


def recipe_digest(system: System) -> str:
    """Return what an image that is made by the recipe has in its label, by which it is found again."""
    return hashlib.sha256("\n".join((*recipe(system), SOURCE_DATE_EPOCH)).encode()).hexdigest()[:12]


def find(client: docker.DockerClient, system: System) -> BaseImage | None:
    """Return the system's base image that the engine has: Debian's, else one bootstrapped before."""
    return _upstream(client, system) or _bootstrapped(client, system)


def is_name_of(name: str, system: System) -> bool:
    """Return whether an image of that name can only be the system's base: Debian's, or one made here."""
    made_here = re.fullmatch(rf"{REPOSITORY}:{re.escape(system.suite)}-[0-9a-f]{{12}}", name)
    return made_here is not None or name in (system.upstream, system.upstream.rpartition(":")[2])


def beneath(client: docker.DockerClient, tag: str, system: System) -> str:
    """Return the reference of the base that an image stands on: its layers begin with those of that one.

    Raises `BaseImageError` where the engine has the base no more.
    """
    layers = client.images.get(tag).attrs["RootFS"]["Layers"]
    for image in (*client.images.list(REPOSITORY), *client.images.list(system.upstream)):
        lower = image.attrs["RootFS"]["Layers"]
        if layers[: len(lower)] == lower:
            return image.tags[0]
    raise BaseImageError(
        f"{tag}: the engine has no {REPOSITORY} or {system.upstream} that it stands on. Build it again"
    )


def ensure(
    client: docker.DockerClient,
    system: System,
    machine: Callable[[], NetworkSettings],
    cache: Path,
    say: Say,
    *,
    pin: str = "",
    newest: bool = False,
) -> BaseImage:
    """Return the system's base image, making it when the engine has none. Raises `BaseImageError`.

    Order: Debian's image on the engine, one bootstrapped before, a pull, a bootstrap. `machine` is called only for the
    last. A `pin` is the digest of the image to be pulled; `newest` pulls before it looks at what is there.
    """
    if not newest and (base := find(client, system)):
        return base
    upstream = system.upstream
    wanted = f"{upstream.rpartition(':')[0]}@{pin}" if pin else upstream
    try:
        say(f"base: pulling {wanted}")
        image = client.images.pull(wanted)
        if pin:
            image.tag(*upstream.rsplit(":", 1))
    except docker.errors.APIError as error:
        if newest and (base := find(client, system)):
            say(f"base: {upstream} cannot be pulled ({_reason(error)}); {base.reference} is here")
            return base
        say(
            f"base: {upstream} cannot be pulled ({_reason(error)});"
            f" bootstrapping Debian {system.suite} from this machine's mirror"
        )
        return _bootstrap(client, system, machine(), cache, say)
    base = _upstream(client, system)
    if base is None:
        raise BaseImageError(f"{upstream} was pulled, but the engine does not list it. Try: docker pull {upstream}")
    return base


def _reason(error: docker.errors.APIError) -> str:
    return str(error.explanation or error).splitlines()[0][:160]


def _upstream(client: docker.DockerClient, system: System) -> BaseImage | None:
    try:
        image = client.images.get(system.upstream)
    except docker.errors.ImageNotFound:
        return None
    # None where it was not pulled but loaded: then only the ID of its configuration is known.
    name = system.upstream.rpartition(":")[0]
    digests = [digest for digest in image.attrs.get("RepoDigests") or () if digest.startswith(f"{name}@")]
    origin = system.upstream if "/" in system.upstream else f"{_REGISTRY}/{system.upstream}"
    return BaseImage(system.upstream, str(image.id), origin, "".join(digests[:1]).partition("@")[2])


def _bootstrapped(client: docker.DockerClient, system: System) -> BaseImage | None:
    # Images built on it have its label too; the SDK's `images.list` would ask for each of them.
    images = client.api.images(REPOSITORY, filters={"label": f"{RECIPE_LABEL}={recipe_digest(system)}"})
    tagged = sorted(tag for image in images for tag in image["RepoTags"])
    if not tagged:
        return None
    image = client.images.get(tagged[0])
    return BaseImage(tagged[0], str(image.id), tagged[0])


def _bootstrap(
    client: docker.DockerClient, system: System, machine: NetworkSettings, cache: Path, say: Say
) -> BaseImage:
    kept = kept_archive(cache, system)
    if not kept.is_file():
        _run_mmdebstrap(system, machine, kept, say)
    with kept.open("rb") as layer, TemporaryFile() as image:
        _write_image(system, layer, image)
        image.seek(0)
        client.images.load(image)
    base = _bootstrapped(client, system)
    if base is None:
        raise BaseImageError(f"the engine took {kept}, but does not list the image")
    return base


def _run_mmdebstrap(system: System, machine: NetworkSettings, archive: Path, say: Say) -> None:
    _need_mmdebstrap(system, say)
    archive.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=archive.parent, prefix="base-") as name:  # two builds at once do not share a file
        scratch = Path(name)
        (scratch / "ca.crt").write_bytes(machine.ca_bundle or b"")
        options = [f"--aptopt={line.rstrip(';')}" for line in machine.apt_proxies]
        options += [f'--aptopt=Acquire::https::CAInfo "{scratch}/ca.crt"'] if machine.ca_bundle else []
        sources = machine.select_sources(system.suite)
        if auth := machine.select_auth(sources):
            (scratch / "auth.conf").write_text(auth)
            options.append(f'--aptopt=Dir::Etc::Netrc "{scratch}/auth.conf"')
        command = ["mmdebstrap", *options, *recipe(system), str(scratch / "base.tar")]
        if sources:
            (scratch / "sources.list").write_text("\n".join(sources) + "\n")
            command.append(str(scratch / "sources.list"))
        environment = os.environ | {"SOURCE_DATE_EPOCH": SOURCE_DATE_EPOCH}
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if result.returncode:
            what = f"mmdebstrap of Debian {system.suite} exited {result.returncode}"
            raise BaseImageError(f"{what}:\n{result.stderr.strip()[-2000:]}")
        (scratch / "base.tar").replace(archive)


def kept_archive(cache: Path, system: System) -> Path:
    """Return where the system's base image that was bootstrapped last is kept, if one was."""
    return cache / f"base-{system.suite}-{recipe_digest(system)}.tar"


def obstacle(system: System) -> str:
    """Return why no base image can be bootstrapped on this machine; empty where one can."""
    if platform.machine() != "x86_64":
        return f"the images are for x86_64 and this machine is {platform.machine()}: no base is made here"
    if os.geteuid() != 0 or not (shutil.which("mmdebstrap") or shutil.which("apt-get")):
        return (
            f"{system.upstream} cannot be pulled and mmdebstrap is not here to make a base. What to do: give the engine"
            f" a {system.upstream} (docker load), or run this as root on Debian or Ubuntu"
        )
    return ""


def _need_mmdebstrap(system: System, say: Say) -> None:
    if reason := obstacle(system):
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


def _write_image(system: System, layer: BufferedReader, out: IO[bytes]) -> None:
    """Write the `docker load` form of a one-layer image of the file system archive `layer`."""
    digest = hashlib.file_digest(layer, "sha256").hexdigest()
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
            content = json.dumps(document).encode()
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
        entry = tarfile.TarInfo("layer.tar")
        entry.size = layer.seek(0, os.SEEK_END)
        layer.seek(0)
        archive.addfile(entry, layer)
