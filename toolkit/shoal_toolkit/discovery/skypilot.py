"""SkyPilot: the nodes of a task.

SKYPILOT_NODE_IPS (one address a line), SKYPILOT_NODE_RANK, SKYPILOT_NUM_NODES and SKYPILOT_NUM_GPUS_PER_NODE are in
SkyPilot's documentation, "Distributed Multi-Node Jobs" and "Environment Variables".
"""

from __future__ import annotations

from collections.abc import Mapping

from shoal_toolkit.discovery.host_list import EXPLICIT, HostList, read_number, require, show
from shoal_toolkit.discovery.host_names import expand_hosts
from shoal_toolkit.errors import ContractError

_SOURCE = "SkyPilot"
_LIST, _RANK, _COUNT = "SKYPILOT_NODE_IPS", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES"
_SECRET = (
    'On SkyPilot, start the task with `sky launch --secret SHOAL_JOB_SECRET="$(openssl rand -hex 32)"`, or with --env '
    "in versions without --secret."
)


def find(environ: Mapping[str, str], hostname: str, root: str) -> HostList | None:
    """Returns the nodes of the task. Raises ContractError if a variable is missing, or their number differs."""
    if not environ.get(_LIST):
        raise ContractError(
            f"{_SOURCE}: {show(environ, _RANK, _COUNT)}, and {_LIST} is not set. Fix: pass all SKYPILOT_* variables "
            f"into the container, or {EXPLICIT}."
        )
    hosts = expand_hosts(environ[_LIST], _LIST)
    count = read_number(environ, _COUNT, 1)
    if count not in (None, len(hosts)):
        raise ContractError(f"{_SOURCE}: {show(environ, _COUNT, _LIST)}: these disagree. Fix: {EXPLICIT}.")
    return HostList(_SOURCE, hosts, require(environ, _RANK, _SOURCE), show(environ, _LIST, _RANK), _SECRET)
