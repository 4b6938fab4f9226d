"""What goes into a build: the Dockerfile and its files, as a deterministic USTAR archive with a record."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from shoal.host.machine import Machine
from shoal.matrix.project import Project
from shoal.matrix.spec import BuildSpec, ImageSpec
from shoal.sources import steps, wheels
from shoal.sources.lock import Pin, read_image
from shoal.sources.render import render, templates

Content = bytes | Path


@dataclass(frozen=True)
class Sources:
    """What of the project goes into an image; the machine's configuration is not part of it.

    `own` are our wheels, by layer, and `installer` what unpacks them; `templates` are what the Dockerfile was rendered
    from.
    """

    dockerfile: bytes
    templates: Mapping[str, bytes]
    locks: Mapping[str, tuple[Pin, ...]]
    engine: Mapping[str, bytes]
    own: Mapping[str, wheels.Wheel]
    installer: Mapping[str, bytes]

    def record(self, base: str) -> steps.Record:
        """Return what the image made of this on `base` (`reference@ID`) remembers of it."""
        contents: dict[str, Mapping[str, str]] = {
            layer: {pin.name: f"{pin.version}@{pin.sha256}" for pin in pins} for layer, pins in self.locks.items()
        }
        contents["engine"] = _digests(self.engine)
        contents["installer"] = _digests(self.installer)
        contents |= {layer: wheel.files for layer, wheel in self.own.items()}
        return steps.record(self.dockerfile.decode(), contents, base, _digests(self.templates))


def _digests(files: Mapping[str, bytes]) -> dict[str, str]:
    return {name: steps.digest(content) for name, content in files.items()}


def own_wheels(project: Project) -> dict[str, wheels.Wheel]:
    """Build our two wheels, by the layer that they make."""
    return {layer: wheels.build(project.root / layer, project.cache) for layer in ("library", "toolkit")}


def gather(
    project: Project, spec: BuildSpec, image: ImageSpec, own: Mapping[str, wheels.Wheel], *, buildkit: bool
) -> Sources:
    """Read the locks and the engine's sources, and render the Dockerfile."""
    return Sources(
        dockerfile=render(project, image, buildkit=buildkit).encode(),
        templates=templates(project, image),
        locks=read_image(project, spec, image),
        engine=_engine(project.root / "library" / "native"),
        own=own,
        installer=wheels.installer(),
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
    context |= {f"installer/{name}": content for name, content in sources.installer.items()}
    for layer, wheel in sources.own.items():
        context[f"{layer}/{wheel.name}"] = wheel.content
    suite = image.system.suite
    context |= {f"machine/debs/{path.name}": path for path in machine.debs.get(suite, ())}
    return context | {f"machine/{name}": content for name, content in machine.files(suite).items()}


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
