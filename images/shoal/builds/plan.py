"""Plans builds: for each image its sources, its parent, its record, and whether and why a build makes it.

`shoal build --dry-run` prints the decisions of the plans, and `builder` executes the plans. Planning reads the project
and asks Docker for images. It builds and pulls nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import docker

from shoal import docker_client
from shoal.builds import base_image
from shoal.builds.base_image import BaseImage
from shoal.docker_client.images import find_image, read_labels
from shoal.errors import BuildError
from shoal.matrix.project import Project
from shoal.matrix.spec import BuildSpec, ImageSpec, System
from shoal.sources import context
from shoal.sources.context import Sources
from shoal.sources.record import Decision, Record, decide


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


def plan_builds(project: Project, spec: BuildSpec, images: Iterable[ImageSpec]) -> list[BuildPlan]:
    """Returns the plans of images and of those that they extend, parents first. Pulls no base image.

    Raises `DockerError`, `SpecError` or `BuildError`, as builds do before they begin.
    """
    wanted = spec.with_parents(images)
    client = docker_client.connect()
    docker_client.check_buildkit(client)
    sources = gather_sources(project, spec, wanted)
    return make_plans(client, sources, {system: base_image.find_base(client, system) for system in systems_of(wanted)})


def systems_of(images: Iterable[ImageSpec]) -> list[System]:
    """Returns the systems of images, each once."""
    return list(dict.fromkeys(image.system for image in images))


def gather_sources(project: Project, spec: BuildSpec, images: Iterable[ImageSpec]) -> list[Sources]:
    """Returns the sources of images. Our packages are installed once for each Python.

    Raises `SpecError` if a lock or template is wrong, `BuildError` if a module of our packages is not Python.
    """
    install = functools.cache(functools.partial(context.install_own_packages, project))
    return [context.gather_sources(project, spec, image, install(image.python_version)) for image in images]


def make_plans(
    client: docker.DockerClient, sources: Sequence[Sources], bases: Mapping[System, BaseImage | None]
) -> list[BuildPlan]:
    """Returns the plans of images, parents first as in `sources`.

    Args:
        client: Docker.
        sources: The sources of each image. An image that another extends comes first.
        bases: The base image of each system; None if Docker does not have it yet.
    """
    plans: dict[str, BuildPlan] = {}
    for each in sources:
        image = each.image
        if image.extends is None:
            parent = bases[image.system]
        else:
            parent = _find_parent(client, image.extends) if plans[image.extends].is_up_to_date else None
        plans[image.tag] = _plan_image(client, image, each, parent)
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
    """Returns an image of the matrix as a base image. Raises `BuildError` if Docker no longer has it."""
    image = find_image(client, tag)
    if image is None:
        raise BuildError(f"{tag}: Docker no longer has this image, which another extends. Fix: build again")
    return BaseImage(tag, str(image.id), tag)
