"""Makes the table in which the library's peer filter notes the connections of a job's processes on this host.

See library/native/peer_filter.c.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping

from shoal_toolkit.plan.members import PEERS

_NAME = "SHOAL_CONNECTIONS"
_SIZE = 65536 * 8  # bytes: a number for each port


def build_connection_variables(plan: Mapping[str, str]) -> dict[str, str]:
    """Returns the variable that names the table, if the variables of the plan load the filter; otherwise none."""
    if PEERS not in plan:
        return {}
    try:
        return {_NAME: f"/proc/{os.getpid()}/fd/{_open_table()}"}
    except OSError:  # a sandbox without memfd_create: who leaves before it is accepted is refused
        return {}


@functools.cache
def _open_table() -> int:
    """Makes the table in memory without a name, which other users cannot open. Returns its descriptor."""
    table = os.memfd_create("shoal-connections")
    os.ftruncate(table, _SIZE)
    return table
