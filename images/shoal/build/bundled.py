"""A bundle as a build reads it: a directory with all that they take from a network. bundle.py fills it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import docker

from shoal.build import base
from shoal.errors import UsageError
from shoal.host.machine import Machine
from shoal.matrix.spec import System

WHEELS = "wheels"
BASE, DEBS, INDEX = "base.tar", "debs", "Packages"
"""In the directory of a suite of Debian: the base image; packages, and among them what apt reads of them."""


def read(directory: Path) -> Machine:
    """Return what a build is given in place of this machine's configuration. Raises UsageError for no bundle."""
    suites = [path.parent for path in directory.glob(f"*/{BASE}") if (path.parent / DEBS / INDEX).is_file()]
    if not suites:
        raise UsageError(
            f"--bundle {directory}: not a bundle. Make it where there is a network: shoal bundle {directory}"
        )
    return Machine(
        pip=(("no-index", "true"),),
        find_links=(directory / WHEELS,),
        apt_sources=(),
        apt_proxies=(),
        ca_bundle=None,
        proxies=(),
        left_out=(),
        debs={suite.name: tuple(sorted((suite / DEBS).glob("*"))) for suite in suites},
    )


def load_bases(client: docker.DockerClient, directory: Path, systems: Iterable[System]) -> None:
    """Give the engine the bundle's base images of these systems, where it has none.

    Raises UsageError for no bundle, and for one that lacks a system.
    """
    suites = read(directory).debs
    for system in systems:
        if system.suite not in suites:
            raise UsageError(
                f"--bundle {directory}: it is for Debian {', '.join(sorted(suites))}, not for {system.suite}."
                f" Add the images where there is a network: shoal bundle {directory}"
            )
        if base.find(client, system) is None:
            with (directory / system.suite / BASE).open("rb") as file:
                client.images.load(file)
