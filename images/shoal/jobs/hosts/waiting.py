"""Containers in which `train` has imported the frameworks of the script, and waits: `shoal run --watch` makes them."""

from __future__ import annotations

import contextlib
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

from rich.console import Console

from shoal.docker_client import archive, images
from shoal.jobs.hosts.docker import DockerHosts, open_hosts, pack_job, run_on_hosts
from shoal.jobs.job import FinishedJob
from shoal.jobs.store import OpenJob
from shoal.jobs.view import View

_START_FILE, _START_PATH = "SHOAL_START_FILE", "run/shoal-start"
"""The variable with a file without which `train` waits, and this file relative to the container's root."""


@dataclass(frozen=True)
class WaitingHosts:
    """The hosts of a job, in containers that run already. `train` waits in them for the start of the job."""

    hosts: DockerHosts
    image_id: str
    """The ID of the request's image."""

    @property
    def console(self) -> Console:
        """The console for messages."""
        return self.hosts.console

    def has_image(self, tag: str) -> bool:
        """Returns whether a tag still names the image that the containers were made with."""
        found = images.find_image(self.hosts.client, tag)
        return found is not None and found.id == self.image_id

    def take_source(self) -> bool:
        """Copies the present source and configuration into all containers. Returns whether they can run it.

        They cannot if a file is gone, or has become a directory or link: it would stay. Or if a container has ended.
        """
        hosts = self.hosts
        for container in hosts.by_name.values():
            container.reload()
            if container.status != "running":
                return False
        before = _list_kinds(hosts.tree)
        hosts.tree.seek(0)
        hosts.tree.truncate()
        pack_job(hosts.request, hosts.name, hosts.owner, hosts.tree)
        after = _list_kinds(hosts.tree)
        if any(after.get(name) != kind for name, kind in before.items()):
            return False
        for container in hosts.by_name.values():
            hosts.tree.seek(0)
            container.put_archive("/", hosts.tree)
        return True

    def run(self, opened: OpenJob, view: View) -> FinishedJob:
        """Runs the job to its end, as `run_job_in_docker` does."""
        self.hosts.view = view
        return run_on_hosts(opened, self.hosts, self.release)

    def release(self) -> None:
        """Lets `train` go on in all containers. A host that is lost later starts without waiting."""
        packed = archive.pack_file(_START_PATH, b"", 0o444, self.hosts.owner, replaces_links=True)
        with self.hosts.follow(self.hosts.by_name):
            for container in self.hosts.by_name.values():
                container.put_archive("/", packed)


@contextlib.contextmanager
def open_waiting_hosts(opened: OpenJob, view: View) -> Iterator[WaitingHosts]:
    """Creates the objects of a job in Docker, as `open_hosts` does, and starts its containers, which wait."""
    with open_hosts(opened, view, {_START_FILE: f"/{_START_PATH}"}) as hosts:
        yield start_waiting(hosts)


def start_waiting(hosts: DockerHosts) -> WaitingHosts:
    """Starts all containers, in which `train` waits."""
    found = images.find_image(hosts.client, hosts.request.image)
    hosts.start_containers(hosts.by_name)
    return WaitingHosts(hosts, str(found.id) if found else "")


def _list_kinds(packed: IO[bytes]) -> dict[str, bytes]:
    """Returns the types of all entries of an archive of `pack_job`, by name."""
    packed.seek(0)
    with tarfile.open(fileobj=packed) as files:
        return {entry.name: entry.type for entry in files}
