"""Ray: it names no hosts in variables, so that a host on it trains alone, with a warning.

Ray sets RAY_JOB_ID for a driver's processes, and reads RAY_ADDRESS ("Environment variables", in Ray's documentation).
The nodes are only in its API: ray.nodes(). Code that starts `train` on each node can set SHOAL_HOSTS from it.
"""

from __future__ import annotations

from collections.abc import Mapping

from shoal_toolkit.discovery.host_list import HostList, show


def find(environ: Mapping[str, str], hostname: str, root: str) -> HostList | None:
    """Returns this host alone, with a warning."""
    evidence = show(environ, "RAY_ADDRESS", "RAY_JOB_ID")
    warning = (
        f"Ray ({evidence}) names no hosts in variables: a single host is assumed. Fix, for several hosts: start one "
        "`train` on each node. Set SHOAL_HOSTS to the NodeManagerAddress of each entry of ray.nodes(), and "
        "SHOAL_HOST_RANK to the node's index."
    )
    return HostList("Ray", (hostname,), 0, evidence, warnings=(warning,))
