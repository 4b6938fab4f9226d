"""Starts jobs and machines; what is started is removed at the end of the test."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import docker
from testcontainers.core.network import Network

from ..containers import Host, StartHost
from .job import MPI, Job, Launcher, lay_out
from .machine import STAYS, Machine


class StartJob:
    """Starts jobs; their containers are removed at the end of the test."""

    def __init__(
        self,
        client: docker.DockerClient,
        start_host: StartHost,
        image: str,
        network: Network,
        directory: Path,
        volumes: Mapping[Path | str, str],
    ) -> None:
        self.client, self.image, self.network, self.directory = client, image, network, directory
        self._start_host, self._volumes = start_host, volumes
        self._jobs = 0

    def __call__(
        self,
        script: str,
        launcher: Launcher = MPI,
        *,
        ranks: int = 1,
        hosts: Sequence[str] = ("algo-1", "algo-2"),
        only: Sequence[str] = (),
        named: Mapping[str, str] | None = None,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        hyperparameters: Mapping[str, Any] | None = None,
        **variables: str,
    ) -> Job:
        """Starts a job of these hosts, with that many ranks on each.

        `only` some of its containers, if so. `named`: container → the host that it claims to be, where not its own
        name. `options`: container → what else to start it with.
        """
        self._jobs += 1
        job = Job(self.client, self.image, launcher)
        for name in only or hosts:
            host = (named or {}).get(name, name)
            tree = self.directory / f"job-{self._jobs}" / name
            lay_out(tree, script, launcher, ranks, hosts, host, hyperparameters or {})
            given = {"command": "train", "volumes": {}, "env": {}, **(options or {}).get(name, {})}
            given["volumes"] = {**self._volumes, **given["volumes"]}
            given["env"] = {**variables, **given["env"]}
            job.hosts[name] = self._start_host(self.image, tree=tree, network=self.network, alias=host, **given)
        return job

    def disconnect(self, host: Host) -> float:
        """Take a container off the job's network; returns when."""
        since = time.time()
        self.client.networks.get(str(self.network.id)).disconnect(host.engines)
        return since

    def machine(self, name: str) -> Machine:
        """Start a container that stays, with nothing in its /opt/ml yet."""
        tree = self.directory / name
        tree.mkdir()
        options = {"tree": tree, "volumes": self._volumes, "network": self.network, "alias": name, "init": True}
        return Machine(self.client, name, self._start_host(self.image, ["sleep", str(STAYS)], **options))

    def beside(self, *command: str, **options: Any) -> Host:
        """Start a container on the job's network that is none of its hosts."""
        return self._start_host(self.image, list(command), network=self.network, alias="beside", **options)
