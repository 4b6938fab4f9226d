"""Kubernetes: an Indexed Job, also one of a JobSet, if its manifest does not name the hosts.

Kubernetes sets JOB_COMPLETION_INDEX in each pod, but neither the number of pods nor their service. See "Indexed Job for
Parallel Processing with Static Work Assignment" in its documentation. The pods of an Indexed Job have the host names
<job>-<index> ("Job with Pod-to-Pod Communication"), pods of a JobSet <jobset>-<job>-<number>-<index>.
"""

from __future__ import annotations

from collections.abc import Mapping

from shoal_toolkit.discovery.host_list import HostList, show
from shoal_toolkit.errors import ContractError


def find(environ: Mapping[str, str], hostname: str, root: str) -> HostList | None:
    """Returns None if another source names the hosts. Raises ContractError otherwise: the job may have more pods."""
    if environ.get("SHOAL_HOSTS") or environ.get("PET_NNODES"):
        return None
    stem = hostname.rpartition("-")[0] or "<job>"
    raise ContractError(
        f"Kubernetes: this pod is one of an Indexed Job ({show(environ, 'JOB_COMPLETION_INDEX')}), and nothing says "
        "how many pods there are and how they reach each other. Fix: set SHOAL_HOSTS to the names of all pods, for "
        f"example {stem}-[0-3].<headless service> for 4 pods; `shoal deploy kubernetes` writes that. If each pod "
        "trains on its own, set SHOAL_HOSTS=localhost and SHOAL_HOST_RANK=0."
    )
