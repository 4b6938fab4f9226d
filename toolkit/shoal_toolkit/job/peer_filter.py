"""Loads the library's peer filter into the processes of a job, so that they accept connections of the job's hosts only.

See docs/decisions/only-members.md, and library/native/peer_filter.c.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping

from shoal_toolkit.job.contract import Job
from shoal_toolkit.job.machine import Machine
from shoal_toolkit.job.settings import MEMBERS_ONLY, is_members_only

PEERS = "SHOAL_PEERS"  # for the filter: names of the other hosts, separated by spaces
_TABLE = "SHOAL_CONNECTIONS"
_TABLE_BYTES = 65536 * 8  # a number for each port
_SLURM = "Slurm"  # other users may have processes on the same host


def build_member_variables(job: Job, machine: Machine) -> dict[str, str]:
    """Returns the variables that load the filter before the libraries that the user preloads; empty if it is off."""
    if not (is_members_only(job.environ) and machine.peer_filter and _can_preload(machine.peer_filter)):
        return {}
    others = [host for host in job.cluster.hosts if host != job.cluster.current_host]
    preloaded = [machine.peer_filter, *filter(None, [job.environ.get("LD_PRELOAD", "")])]
    return {"LD_PRELOAD": ":".join(preloaded), PEERS: " ".join(others)}


def _can_preload(path: str) -> bool:
    """Returns whether the system's loader takes a path: it separates those in LD_PRELOAD at spaces and colons."""
    return not {" ", ":"} & {*path}


def describe_open_ports(job: Job, machine: Machine, ranks: Mapping[str, int]) -> list[str]:
    """Returns a note if nothing that `train` knows of keeps strangers from the ports of the ranks; none otherwise.

    Args:
        job: The job.
        machine: This host's machine.
        ranks: Host → number of ranks.
    """
    if is_members_only(job.environ):
        if machine.peer_filter and not _can_preload(machine.peer_filter):
            return [
                f"{MEMBERS_ONLY}=1 has no effect: programs cannot preload {machine.peer_filter!r}, because of a space "
                "or colon in its path. Fix: move this Python environment to another directory."
            ]
        if machine.peer_filter:
            return []
        return [
            f"{MEMBERS_ONLY}=1 has no effect: this Python has no package smdistributed, which refuses strangers. "
            "Fix: run the job in an image that `shoal build` has made, or in one that extends it."
        ]
    several = len(job.cluster.hosts) > 1
    if not several and (job.cluster.found.source != _SLURM or sum(ranks.values()) < 2):
        return []
    return [
        "the ports of torch, TensorFlow, MPI and NCCL ask for no password: anybody who reaches them can take part in "
        "the job. SageMaker's network keeps others out. Elsewhere the platform must, or set "
        f"{MEMBERS_ONLY}=1 on every host (docs/security.md)."
    ]


def build_connection_variables(plan: Mapping[str, str]) -> dict[str, str]:
    """Returns the variable that names the table, if the variables of the plan load the filter; otherwise none."""
    if PEERS not in plan:
        return {}
    try:
        return {_TABLE: f"/proc/{os.getpid()}/fd/{_open_table()}"}
    except OSError:  # a sandbox without memfd_create: who leaves before it is accepted is refused
        return {}


@functools.cache
def _open_table() -> int:
    """Makes the table in memory without a name, which other users cannot open. Returns its descriptor."""
    table = os.memfd_create("shoal-connections")
    os.ftruncate(table, _TABLE_BYTES)
    return table
