"""WORLD_SIZE, RANK and MASTER_ADDR without a platform that explains them: a host trains alone, with a warning.

torchrun and several schedulers set them for the processes of torch.distributed ("torchrun", in PyTorch's
documentation). They name only one host, and count processes or hosts.
"""

from __future__ import annotations

from collections.abc import Mapping

from shoal_toolkit.discovery.host_list import HostList, show


def find(environ: Mapping[str, str], hostname: str, root: str) -> HostList | None:
    """Returns this host alone, with a warning; None if WORLD_SIZE is 1, or it or RANK is not set."""
    if environ.get("WORLD_SIZE", "1") == "1" or not environ.get("RANK"):
        return None
    evidence = show(environ, "MASTER_ADDR", "WORLD_SIZE", "RANK")
    warning = (
        f"{evidence} are set, and do not name the hosts of the job: a single host is assumed. Fix, for several hosts: "
        "set SHOAL_HOSTS and SHOAL_HOST_RANK on every host. `train` sets these variables for the script itself."
    )
    return HostList("torch.distributed", (hostname,), 0, evidence, warnings=(warning,))
