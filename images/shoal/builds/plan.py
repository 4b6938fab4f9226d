"""Plans builds: for each image its sources with their build context, its parent, its record, and why a build makes it.

`shoal build --dry-run` prints the decisions of the plans, and `builder` executes the plans. Planning reads the project
and asks Docker for images. It builds nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import docker

from shoal import docker_client
from shoal.builds import base_image, debian_lock
from shoal.builds.base_image import BaseImage
from shoal.docker_client.archive import Content
from shoal.docker_client.images import find_image, read_labels
from shoal.errors import BuildError
from shoal.matrix.project import Project
from shoal.matrix.spec import BuildSpec, ImageSpec, System
from shoal.network.settings import NetworkSettings
from shoal.sources import packages, record, render
from shoal.sources.lock import Pin, find_locked_wheels, read_image_pins
from shoal.sources.record import Decision, Record, decide
from shoal.sources.steps import BuildStep

GetBase = Callable[[docker.DockerClient, System], BaseImage | None]


@dataclass(frozen=True)
class BuildPlan:
    """The build of one image: its inputs, and the decision whether a build makes it."""

    image: ImageSpec
    sources: Sources
    parent: BaseImage | None
    """The image that it extends; None if a build makes or pulls it first. No image has such a record."""
    record: Record
    decision: Decision
    present_id: str | None
    """The ID of the image that Docker has under the tag."""

    @property
    def is_up_to_date(self) -> bool:
        return self.decision.state == "up to date"

    def complete(self, client: docker.DockerClient) -> BuildPlan:
        """Returns the plan with the image that it extends, which was built meanwhile, and with a new decision.

        Raises `BuildError` if Docker does not have that image.
        """
        if self.parent or not self.image.extends:
            return self
        return _plan_image(client, self.image, self.sources, _find_parent(client, self.image.extends))


def plan_builds(
    project: Project, spec: BuildSpec, images: Iterable[ImageSpec], get_base: GetBase = base_image.find_base
) -> list[BuildPlan]:
    """Returns the plans of images and of those that they extend, parents first. Connects to Docker once.

    Args:
        project: The project. Our packages are installed once for each Python.
        get_base: Returns the base image of a system, or None if a build provides it later. It is called for each system
            after all sources are read.

    Raises:
        DockerError, SpecError: If Docker has no BuildKit, or if a lock or template is wrong.
        BuildError: If a module of our packages is not Python, or Docker lost a parent.
    """
    wanted = spec.with_parents(images)
    client = docker_client.connect()
    docker_client.check_buildkit(client)
    install = functools.cache(functools.partial(install_own_packages, project))
    sources = [gather_sources(project, spec, image, install(image.python_version)) for image in wanted]
    bases = {system: get_base(client, system) for system in dict.fromkeys(image.system for image in wanted)}
    plans: dict[str, BuildPlan] = {}
    for image, own in zip(wanted, sources, strict=True):
        if image.extends is None:
            parent = bases[image.system]
        else:
            parent = _find_parent(client, image.extends) if plans[image.extends].is_up_to_date else None
        plans[image.tag] = _plan_image(client, image, own, parent)
    return list(plans.values())


def _plan_image(client: docker.DockerClient, image: ImageSpec, sources: Sources, parent: BaseImage | None) -> BuildPlan:
    missing = (
        f"{image.extends} (rebuilt)" if image.extends else f"{image.system.upstream} (Docker does not have it yet)"
    )
    # A record never has the identity of a missing parent, so the plan says that it is built.
    record = sources.make_record(parent.identity if parent else f"{missing}@")
    present = find_image(client, image.tag)
    decision = decide(image.tag, read_labels(present) if present else None, record)
    return BuildPlan(image, sources, parent, record, decision, str(present.id) if present else None)


def _find_parent(client: docker.DockerClient, tag: str) -> BaseImage:
    image = find_image(client, tag)
    if image is None:
        raise BuildError(f"{tag}: Docker no longer has this image, which another extends. Fix: build again")
    return BaseImage(tag, str(image.id), tag)


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
        debian=debian_lock.comparison_files(project, image.system.suite, spec.list_extensions(image)),
        own={} if image.extends else own,
        files=render.read_own_files(project, image, steps),
    )


def _read_c_sources(native: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in native.iterdir() if path.suffix in (".c", ".h", ".txt")}
