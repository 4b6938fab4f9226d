"""Machines that stay when a job has ended, as without Docker, so that leftovers can be found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import docker

from ..containers import Host
from .job import SECONDS_AT_MOST, Launcher, lay_out, run_inside, until

STAYS = 600  # seconds at most


class Run(NamedTuple):
    """A command that runs in a machine."""

    client: docker.DockerClient
    id: str

    def wait(self, seconds: float = SECONDS_AT_MOST) -> int:
        """Return the command's exit code, once it has ended."""
        until(lambda: not self._inspect()["Running"], lambda: str(self._inspect()), seconds)
        return int(self._inspect()["ExitCode"])

    def _inspect(self) -> dict[str, Any]:
        found: dict[str, Any] = self.client.api.exec_inspect(self.id)
        return found


class Machine(NamedTuple):
    """A container that stays, in which `train` is not PID 1, so that leftovers can be found."""

    client: docker.DockerClient
    name: str
    host: Host

    def lay_out(
        self, base: str, script: str, launcher: Launcher, ranks: int = 1, hosts: Sequence[str] = ("algo-1",)
    ) -> Path:
        """Writes the base directory of a job, in /opt/ml or below it; returns its path on this machine."""
        tree = self.host.path(base)
        code = {"sagemaker_submit_directory": str(Path("/opt/ml", base, "code"))}
        lay_out(tree, script, launcher, ranks, hosts, self.name, code)
        return tree

    def train(self, base: str, **variables: str) -> Run:
        """Start the job in a directory below /opt/ml, where its output goes too."""
        command = 'exec train >"$SAGEMAKER_BASE_DIR/log" 2>&1'
        return self.run("sh", "-c", command, SAGEMAKER_BASE_DIR=f"/opt/ml/{base}", **variables)

    def run(self, *command: str, **variables: str) -> Run:
        """Start a command."""
        made = self.client.api.exec_create(self.host.engines.id, list(command), environment=variables)
        self.client.api.exec_start(made["Id"], detach=True)
        return Run(self.client, str(made["Id"]))

    def is_clean(self) -> None:
        """Nothing is left behind, now or as soon as killed processes are gone.

        The scripts that leave processes behind leave them for 300 s; a file that stays, stays for ever.
        """
        until(lambda: not self._left_behind(), lambda: f"left behind: {self._left_behind()}", 30)

    def _left_behind(self) -> list[str]:
        """What is there and was not before: processes, and temporary files (but torchrun's, which it never removes)."""
        processes = [process[-1] for process in self.host.engines.top()["Processes"]]
        find = ("find", "/tmp", "/dev/shm", "/var/tmp", "-mindepth", "1", "-maxdepth", "1")
        _, files = run_inside(self.host.engines, *find, "-not", "-name", "torchelastic_*")
        return [process for process in processes if f"sleep {STAYS}" not in process] + files.split()
