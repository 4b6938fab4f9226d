"""Plans builds: for each image its sources, its parent, its record, and whether and why a build makes it.

`shoal build --dry-run` prints the decisions of the plans, and `builder` executes the plans. Planning reads the project
and asks Docker for images. It builds nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
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
    install = functools.cache(functools.partial(context.install_own_packages, project))
    sources = [context.gather_sources(project, spec, image, install(image.python_version)) for image in wanted]
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
