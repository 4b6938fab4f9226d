"""Hosts of a job as loopback addresses of this machine: for jobs without MPI, which takes them for one host."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from .conftest import TRAIN, Tree, clean_environment, make_tree

NAMES = ("127.0.0.1", "127.0.0.2")


def two_trees(base: Path) -> list[Tree]:
    """Make a tree for each host."""
    trees = [make_tree(base / name) for name in NAMES]
    for tree, name in zip(trees, NAMES):
        tree.hosts(name, *NAMES, network_interface_name="lo")
    return trees


def free_ports() -> dict[str, str]:
    """Return ports for a job. The first `train` listens on MASTER_PORT too, and other tests have the default."""
    names = ("SHOAL_AGENT_PORT", "MASTER_PORT")
    with socket.create_server(("", 0)) as agent, socket.create_server(("", 0)) as master:
        return {name: str(probe.getsockname()[1]) for name, probe in zip(names, (agent, master))}


@contextmanager
def started(
    trees: list[Tree], enter: tuple[str, str] = (":", ":"), **variables: str
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start `train` on each host, after a shell's command, and end it in any case. A failure tells what each wrote."""
    variables = {**free_ports(), **variables}
    with ExitStack() as undo:
        trains = []
        for tree, first in zip(trees, enter):
            environment = clean_environment(
                SAGEMAKER_BASE_DIR=str(tree.base), SAGEMAKER_PROGRAM="train.py", **variables
            )
            command = ["/bin/sh", "-c", f'{first}; exec "$@"', "sh", *TRAIN]
            train = subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            trains.append(undo.enter_context(train))
            undo.callback(train.kill)
        try:
            yield trains
        except Exception as error:
            for name, train in zip(NAMES, trains):
                train.kill()
                error.add_note(f"{name}: {train.communicate()}")
            raise
