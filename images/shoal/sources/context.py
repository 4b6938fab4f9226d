"""The build context of an image: its Dockerfile, the files that the steps read, and the record of all that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shoal.docker_client.archive import Content
from shoal.matrix.project import Project
from shoal.matrix.spec import BuildSpec, ImageSpec
from shoal.network.settings import NetworkSettings
from shoal.sources import debian, packages, record, render
from shoal.sources.pins import Pin, find_locked_wheels, read_image_pins
from shoal.sources.steps import BuildStep


@dataclass(frozen=True)
class Sources:
    """The parts of the project that go into an image. The machine's configuration is not among them."""

    image: ImageSpec
    dockerfile: bytes
    steps: tuple[BuildStep, ...]
    templates: Mapping[str, bytes]
    """The files that declare the steps."""
    locks: Mapping[str, tuple[Pin, ...]]
    engine: Mapping[str, bytes]
    """C sources of the library, and the compiler's options."""
    debian: Mapping[str, bytes]
    own: Mapping[str, bytes]
    """Our packages as they are installed, by layer."""
    files: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict)
    """The project's own files that steps read, by folder and path."""

    def make_record(self, base: str) -> record.Record:
        """Returns the record of an image: digests of all its inputs, and `base` (`reference@ID`), which it extends."""
        contents: dict[str, Mapping[str, str]] = {
            layer: {pin.name: f"{pin.version}@{pin.sha256}" for pin in pins} for layer, pins in self.locks.items()
        }
        for folder, files in (("engine", self.engine), ("debian", self.debian), *self.files.items()):
            contents[folder] = {name: record.sha256(content) for name, content in files.items()}
        contents |= {layer: packages.read_digests(content) for layer, content in self.own.items()}
        return record.make_record(self.steps, contents, base, self.templates)

    def context_files(self, spec: BuildSpec, machine: NetworkSettings) -> dict[str, Content]:
        """Returns the files of the build context, by path.

        Among them are locked wheels of local directories, and this machine's settings with credentials under
        `machine/`. The image's own package index is named for the framework, unless a local wheel makes it unnecessary.
        """
        context: dict[str, Content] = {"Dockerfile": self.dockerfile}
        for layer, pins in self.locks.items():
            local = [path for _, path in find_locked_wheels(pins, machine.find_links)]
            index = spec.indexes[self.image.index] if self.image.index and layer == "framework" else None
            # Another index is asked only if its file is not at hand: an unreachable one costs pip minutes.
            lines = [f"--extra-index-url {index}"] if index and not any("+" in path.name for path in local) else []
            context[f"{layer}/requirements.txt"] = "\n".join([*lines, *map(str, pins), ""]).encode()
            context |= {f"{layer}/{path.name}": path for path in local}
        context |= {f"{layer}/installed.tar": content for layer, content in self.own.items()}
        suite = self.image.system.suite
        for folder, files in (
            ("engine", self.engine),
            ("debian", self.debian),
            ("machine", machine.build_files(suite)),
            *self.files.items(),
        ):
            context |= {f"{folder}/{name}": content for name, content in files.items()}
        return context | {f"machine/debs/{path.name}": path for path in machine.debs.get(suite, ())}


def install_own_packages(project: Project, python: str) -> dict[str, bytes]:
    """Returns our packages as images with that Python have them: a tar archive for each layer.

    Nothing is installed on this machine. See `packages.install_package` for the cache and other effects. Raises
    BuildError.
    """
    return {layer: packages.install_package(project.part(layer), python, project.cache) for layer in packages.PACKAGES}


def gather_sources(project: Project, spec: BuildSpec, image: ImageSpec, own: Mapping[str, bytes]) -> Sources:
    """Reads all parts of the project that go into an image: steps, locks, templates, C sources and Debian's lock.

    Raises `SpecError` if a lock or template is wrong.

    Args:
        own: Our packages, installed for the image's Python. An image that extends another does not get them.
    """
    steps = render.read_steps(project, image, bytecode=packages.can_compile_for(image.python_version))
    return Sources(
        image=image,
        dockerfile=render.render_dockerfile(project, image, steps).encode(),
        steps=steps,
        templates=render.read_templates(project, image),
        locks=read_image_pins(project, spec, image),
        engine=_read_c_sources(project.part("library") / "native"),
        debian=debian.comparison_files(project, image.system.suite, spec.list_extensions(image)),
        own={} if image.extends else own,
        files=render.read_own_files(project, image, steps),
    )


def _read_c_sources(native: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in native.iterdir() if path.suffix in (".c", ".h", ".txt")}
