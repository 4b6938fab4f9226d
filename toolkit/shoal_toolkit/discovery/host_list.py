"""The hosts of a job as a platform describes them, and the variables that show each platform."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from shoal_toolkit.fast_typing import NamedTuple

EXPLICIT_SOURCE = "platforms.find_explicit"
SOURCES: dict[str, tuple[str, ...]] = {
    EXPLICIT_SOURCE: ("SHOAL_HOSTS", "SHOAL_HOST_RANK"),
    "slurm.find_slurm": (
        *("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODEID", "SLURM_JOB_NUM_NODES"),
        *("SLURM_NNODES", "SLURM_JOB_ID", "SLURM_STEP_ID"),
    ),
    "kubernetes.find_kubeflow": ("PET_NNODES", "PET_NODE_RANK"),
    "kubernetes.find_kubeflow_v1": ("MASTER_ADDR",),
    "kubernetes.find_mpi_operator": ("K_MPI_JOB_ROLE",),
    "kubernetes.find_indexed_job": ("JOB_COMPLETION_INDEX",),
    "platforms.find_aws_batch": (
        "AWS_BATCH_JOB_NUM_NODES",
        "AWS_BATCH_JOB_NODE_INDEX",
        "AWS_BATCH_JOB_MAIN_NODE_INDEX",
    ),
    "platforms.find_skypilot": ("SKYPILOT_NODE_IPS", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES"),
}
HINTS: dict[str, tuple[str, ...]] = {
    "platforms.find_ray": ("RAY_ADDRESS", "RAY_JOB_ID"),
    "platforms.find_rank_variables": (
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
        *("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    ),
}

# With these the MPI Operator makes mpirun in the launcher use ssh and its hostfile.
_LAUNCH_VARIABLES = (
    "OMPI_MCA_orte_default_hostfile",
    "OMPI_MCA_orte_keep_fqdn_hostnames",
    "OMPI_MCA_orte_set_default_slots",
    "OMPI_MCA_plm_rsh_args",
)


class Registration(NamedTuple):
    """How hosts that know only the first host's address learn all addresses: see `hosts/registration.py`."""

    main_address: str  # empty on the first host
    job: str  # the same on all hosts of one job


class HostList(NamedTuple):
    """The hosts of a job, in the same order on every host."""

    source: str
    hosts: tuple[str, ...]
    rank: int  # the index of this host
    evidence: str  # the variables or the file, with their values
    secret: str = ""  # how this platform gives a secret to all hosts: a sentence
    warnings: tuple[str, ...] = ()
    registration: Registration | None = None  # None if `hosts` has names that resolve

    @property
    def current_host(self) -> str:
        return self.hosts[self.rank]


def remove_launch_variables(environ: MutableMapping[str, str]) -> None:
    """Removes the variables of the MPI Operator for mpirun: `train` names the hosts and starts the daemons itself."""
    if environ.get("K_MPI_JOB_ROLE"):
        for name in _LAUNCH_VARIABLES:
            environ.pop(name, None)


def list_present(sources: Mapping[str, tuple[str, ...]], environ: Mapping[str, str]) -> list[str]:
    """Returns the sources of which a variable is set. An empty one counts only for `find_explicit`."""
    return [
        name
        for name, variables in sources.items()
        if any(variable in environ if name == EXPLICIT_SOURCE else environ.get(variable) for variable in variables)
    ]
