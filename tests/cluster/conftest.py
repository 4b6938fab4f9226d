"""One Slurm cluster for all tests of this folder, and jobs on it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .slurm import ROOT, Cluster, start_cluster

SECONDS = 240.0
"""The longest wait for a job: a busy machine needs it."""


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Slurm takes a lost node for lost after a minute: `train` notices it first."""
    with start_cluster(node_timeout=60) as started:
        yield started


class Work:
    """A user's directory on the shared disk, in which they submit jobs of examples/slurm/train.sbatch."""

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self.cluster, self.directory = cluster, directory

    def submit(self, script: str, **hyperparameters: object) -> int:
        """Submits a job that runs a script of the test as train.py, with relative paths."""
        names = ("code", "channel", "hyperparameters.json")
        code, channel, values = (self.directory / name for name in names)
        code.mkdir()
        channel.mkdir()
        (code / "train.py").write_text(script)
        values.write_text(json.dumps({"sagemaker_program": "train.py", **hyperparameters}))
        return self.submit_example(CODE=names[0], CHANNEL=names[1], HYPERPARAMETERS=names[2])

    def submit_example(self, **variables: str) -> int:
        """Submits the example with the `train` of this virtual environment."""
        path = f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}"
        script = ROOT / "examples" / "slurm" / "train.sbatch"
        return self.cluster.submit(script, cwd=self.directory, variables={"PATH": path, **variables})

    def base(self, job: int, node: str) -> Path:
        """Returns the /opt/ml of a node."""
        return self.directory / "jobs" / f"digits-{job}" / node

    def secret(self, job: int) -> Path:
        return self.directory / "jobs" / f"digits-{job}" / "secret"

    def outcome(self, job: int, node: str) -> tuple[str, dict[str, Any]]:
        """Returns a node's failure message, empty for a success, and its job.json. One of both files is there."""
        output = self.base(job, node) / "output"
        assert (output / "success").exists() != (output / "failure").exists()
        message = "" if (output / "success").exists() else (output / "failure").read_text()
        return message, json.loads((output / "job.json").read_text())


@pytest.fixture
def work(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Work]:
    """Jobs that still run at the end, after a failure, are cancelled."""
    directory = cluster.directory / request.node.name.replace("[", "-").rstrip("]")
    directory.mkdir()
    yield Work(cluster, directory)
    cluster.ask("scancel", "--user=root")
