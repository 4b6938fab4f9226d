"""What goes into a build: the Dockerfile and its files, as a deterministic USTAR archive with a fingerprint."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from shoal import wheels
from shoal.lock import Pin, read_image
from shoal.machine import Machine
from shoal.project import LAYERS, Project
from shoal.render import render
from shoal.spec import BuildSpec, ImageSpec

Content = bytes | Path


@dataclass(frozen=True)
class Sources:
    """What of the project goes into an image: its fingerprint says whether an image on the engine is up to date."""

    dockerfile: bytes
    locks: Mapping[str, tuple[Pin, ...]]
    engine: Mapping[str, bytes]
    library: wheels.Wheel
    toolkit: wheels.Wheel

    def fingerprint(self, base_id: str) -> str:
        """Return the SHA-256 (hexadecimal) over everything that goes in; the machine's configuration does not."""
        digest = hashlib.sha256(self.dockerfile + base_id.encode())
        for layer in LAYERS:
            digest.update("\n".join([layer, *map(str, self.locks[layer])]).encode())
        own = {self.library.name: self.library.content, self.toolkit.name: self.toolkit.content}
        for name, content in [*sorted(self.engine.items()), *own.items()]:
            digest.update(name.encode() + hashlib.sha256(content).digest())
        return digest.hexdigest()


def gather(project: Project, spec: BuildSpec, image: ImageSpec, *, buildkit: bool) -> Sources:
    """Read the locks and the engine's sources, render the Dockerfile and build our two wheels."""
    return Sources(
        dockerfile=render(project, image, buildkit=buildkit).encode(),
        locks=read_image(project, spec, image),
        engine=_engine(project.root / "library" / "native"),
        library=wheels.build(project.root / "library"),
        toolkit=wheels.build(project.root / "toolkit"),
    )


def files(sources: Sources, spec: BuildSpec, image: ImageSpec, machine: Machine) -> dict[str, Content]:
    """Return the files of the build context, by path."""
    context: dict[str, Content] = {"Dockerfile": sources.dockerfile}
    for layer, pins in sources.locks.items():
        local = list(wheels.at_hand(pins, machine.find_links))
        index = spec.indexes[image.index] if image.index and layer == "framework" else None
        # A foreign index is asked only when its file is not at hand: an unreachable one costs pip minutes.
        ask = index if not any("+" in path.name for path in local) else None
        context[f"{layer}/requirements.txt"] = _requirements(pins, ask)
        context |= {f"{layer}/{path.name}": path for path in local}
    context |= {f"engine/{name}": content for name, content in sources.engine.items()}
    for layer, wheel in (("library", sources.library), ("toolkit", sources.toolkit)):
        context[f"{layer}/{wheel.name}"] = wheel.content
    return context | {f"machine/{name}": content for name, content in machine.files().items()}


def _engine(native: Path) -> dict[str, bytes]:
    """What the library's engine is compiled from, and the compiler's options."""
    return {path.name: path.read_bytes() for path in native.iterdir() if path.suffix in (".c", ".h", ".txt")}


def _requirements(pins: tuple[Pin, ...], index: str | None) -> bytes:
    lines = [f"--extra-index-url {index}"] if index else []
    return "\n".join([*lines, *map(str, pins), ""]).encode()


def write_tar(contents: Mapping[str, Content], out: IO[bytes]) -> None:
    """Write `contents` as a USTAR archive: sorted, owner 0, time 0, mode 0644, so equal contents give equal bytes."""
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, content in sorted(contents.items()):
            entry = tarfile.TarInfo(name)
            if isinstance(content, Path):
                entry.size = content.stat().st_size
                with content.open("rb") as file:
                    archive.addfile(entry, file)
            else:
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
