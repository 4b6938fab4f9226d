"""What goes into a build: the Dockerfile and its files, and the record of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.engine.archive import Content
from shoal.host.machine import Machine
from shoal.matrix.project import Project
from shoal.matrix.spec import BuildSpec, ImageSpec
from shoal.sources import bytecode, debian, packages, steps, wheels
from shoal.sources.pins import Pin, read_image
from shoal.sources.render import render, templates


@dataclass(frozen=True)
class Sources:
    """What of the project goes into an image; the machine's configuration is not part of it.

    `own` are our packages as they are installed, by layer; `templates` are what the Dockerfile was rendered from.
    """

    dockerfile: bytes
    templates: Mapping[str, bytes]
    locks: Mapping[str, tuple[Pin, ...]]
    engine: Mapping[str, bytes]
    debian: Mapping[str, bytes]
    own: Mapping[str, bytes]

    def record(self, base: str) -> steps.Record:
        """Return what the image made of this on `base` (`reference@ID`) remembers of it."""
        contents: dict[str, Mapping[str, str]] = {
            layer: {pin.name: f"{pin.version}@{pin.sha256}" for pin in pins} for layer, pins in self.locks.items()
        }
        contents |= {"engine": _digests(self.engine), "debian": _digests(self.debian)}
        contents |= {layer: packages.contents(content) for layer, content in self.own.items()}
        return steps.record(self.dockerfile.decode(), contents, base, _digests(self.templates))


def _digests(files: Mapping[str, bytes]) -> dict[str, str]:
    return {name: steps.digest(content) for name, content in files.items()}


def own_packages(project: Project, python: str) -> dict[str, bytes]:
    """Install our packages for images with that Python, by the layer that they make. Raises BuildError."""
    return {layer: packages.installed(project.root / layer, python, project.cache) for layer in packages.PACKAGES}


def gather(project: Project, spec: BuildSpec, image: ImageSpec, own: Mapping[str, bytes]) -> Sources:
    """Read the locks and the engine's sources, and render the Dockerfile. `own` are for the image's Python."""
    return Sources(
        dockerfile=render(project, image, bytecode=bytecode.is_of(image.python_version)).encode(),
        templates=templates(project, image),
        locks=read_image(project, spec, image),
        engine=_engine(project.root / "library" / "native"),
        debian=debian.context(project, image.system.suite),
        own={} if image.extends else own,
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
    context |= {f"debian/{name}": content for name, content in sources.debian.items()}
    context |= {f"{layer}/installed.tar": content for layer, content in sources.own.items()}
    suite = image.system.suite
    context |= {f"machine/debs/{path.name}": path for path in machine.debs.get(suite, ())}
    return context | {f"machine/{name}": content for name, content in machine.files(suite).items()}


def _engine(native: Path) -> dict[str, bytes]:
    """What the library's engine is compiled from, and the compiler's options."""
    return {path.name: path.read_bytes() for path in native.iterdir() if path.suffix in (".c", ".h", ".txt")}


def _requirements(pins: tuple[Pin, ...], index: str | None) -> bytes:
    lines = [f"--extra-index-url {index}"] if index else []
    return "\n".join([*lines, *map(str, pins), ""]).encode()
