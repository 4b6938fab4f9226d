"""Variables of a process that mpirun or torchrun started, without a platform that names the hosts.

torchrun and several schedulers set WORLD_SIZE, RANK and MASTER_ADDR ("torchrun", in PyTorch's documentation). They name
only one host, and count processes or hosts. Open MPI's mpirun sets OMPI_COMM_WORLD_SIZE, MPICH's and Intel's PMI_SIZE.
`train` runs once on each host and starts the ranks itself: as one of several ranks it would train once for each.
"""

from __future__ import annotations

from collections.abc import Mapping

from shoal_toolkit.discovery.host_list import EXPLICIT, HostList, is_local, read_number, show
from shoal_toolkit.errors import ContractError

_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "LOCAL_WORLD_SIZE")
_ELASTIC = "TORCHELASTIC_RUN_ID"


def find(environ: Mapping[str, str], hostname: str, root: str) -> HostList | None:
    """Returns this host alone, with a warning; None if these variables describe one process.

    Raises:
        ContractError: If this process is one of several ranks, or MASTER_ADDR is another host.
    """
    several = (read_number(environ, "WORLD_SIZE") or 1) > 1
    _check_launcher(environ, several)
    if not several:
        return None
    evidence = show(environ, "MASTER_ADDR", "WORLD_SIZE", "RANK", "NODE_RANK")
    if not is_local(environ.get("MASTER_ADDR", "")):
        raise ContractError(
            f"variables of a rank ({evidence}) do not name the hosts of the job. Fix, for several hosts: {EXPLICIT}; "
            "`train` sets these variables for the script itself. Fix, for one host: unset them."
        )
    warning = (
        f"variables of a rank ({evidence}) do not name the hosts of the job: a single host is assumed. Fix, for "
        f"several hosts: {EXPLICIT}. `train` sets these variables for the script itself."
    )
    return HostList("torch.distributed", (hostname,), 0, evidence, warnings=(warning,))


def _check_launcher(environ: Mapping[str, str], several: bool) -> None:
    """Raises ContractError if mpirun or torchrun has started `train` as one of several ranks."""
    names = [name for name in _SIZES if (read_number(environ, name) or 1) > 1]
    names += [_ELASTIC, "WORLD_SIZE"] if several and environ.get(_ELASTIC) else []
    if names:
        raise ContractError(
            f"mpirun or torchrun has started `train` as one of several ranks ({show(environ, *names)}). `train` runs "
            "once on each host, and starts the ranks itself. Fix: start `train` without mpirun and torchrun; "
            f"sagemaker_mpi_num_of_processes_per_host is the number of ranks. For several hosts, {EXPLICIT}."
        )
