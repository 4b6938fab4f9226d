"""The places in which `train` looks for the hosts of a job without resourceconfig.json, in their order.

To add a source, write a function of a module in this package, `(environ, hostname, root) -> HostList | None`, and add a
row to `SOURCES`: module.function and the variables that show its platform. The module is imported only if one of these
is set. The function cites the documentation of its variables, and raises ContractError if only some are there.
Rows of `HINTS` are asked last, and all of them: these name no hosts, and a host there trains alone with a warning.
docs/clusters.md has a table of the sources, and tests/toolkit/test_discovery.py has cases for each.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from importlib import import_module
from typing import TYPE_CHECKING

from shoal_toolkit.errors import ContractError

if TYPE_CHECKING:  # most jobs have none of the variables below
    from shoal_toolkit.discovery.host_list import HostList

_EXPLICIT = "platforms.find_explicit"
SOURCES: dict[str, tuple[str, ...]] = {
    _EXPLICIT: ("SHOAL_HOSTS", "SHOAL_HOST_RANK"),
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


def remove_launch_variables(environ: MutableMapping[str, str]) -> None:
    """Removes the variables of the MPI Operator for mpirun: `train` names the hosts and starts the daemons itself."""
    if environ.get("K_MPI_JOB_ROLE"):
        for name in _LAUNCH_VARIABLES:
            environ.pop(name, None)


def find_hosts(environ: Mapping[str, str], hostname: str, root: str = "/") -> HostList | None:
    """Returns the hosts of this job from the variables of a platform; None if there is no such platform.

    Args:
        environ: The environment of `train`.
        hostname: The name of this host.
        root: The directory under which etc is.

    Raises:
        ContractError: If a platform's variables are incomplete or wrong, or two platforms disagree. SHOAL_HOSTS
            decides such cases: with it, another platform that is incomplete or disagrees is only a warning.
    """
    found = _ask_sources(environ, hostname, root)
    if found is not None:
        return found
    hints = [_ask(name, environ, hostname, root) for name in _present(HINTS, environ)]
    return next((hosts for hosts in hints if hosts is not None), None)


def _ask_sources(environ: Mapping[str, str], hostname: str, root: str) -> HostList | None:
    """Others than the first source that disagree are warnings with SHOAL_HOSTS, otherwise a ContractError."""
    found: list[HostList] = []
    broken: tuple[str, ...] = ()
    for name in _present(SOURCES, environ):
        try:
            hosts = _ask(name, environ, hostname, root)
        except ContractError as error:
            if not (found and environ.get("SHOAL_HOSTS")):
                raise
            broken += (_describe_error(error, found[0].source),)
        else:
            found += [hosts] if hosts is not None else []
    if not found:
        return None
    first = found[0]._replace(warnings=(*found[0].warnings, *broken))
    for other in found[1:]:
        if (len(other.hosts), other.rank) != (len(first.hosts), first.rank):
            first = first._replace(warnings=(*first.warnings, _describe_disagreement(first, other, environ)))
    return first


def warn_about_other_hosts(
    hosts: tuple[str, ...], rank: int, environ: Mapping[str, str], hostname: str
) -> tuple[str, ...]:
    """Returns a warning if the variables of a platform name another number of hosts than resourceconfig.json, or rank.

    Variables that are incomplete or wrong are a warning too.

    Args:
        hosts: The hosts of resourceconfig.json.
        rank: The index of this host in them.
        environ: The environment of `train`.
        hostname: The name of this host.
    """
    try:
        found = _ask_sources(environ, hostname, "/")
    except ContractError as error:
        return (_describe_error(error, "resourceconfig.json"),)
    if found is None or (len(found.hosts), found.rank) == (len(hosts), rank):
        return ()
    return (
        f"resourceconfig.json gives {len(hosts)} hosts and the rank {rank}, and {found.source} {len(found.hosts)} "
        f"hosts and the rank {found.rank} ({found.evidence}): resourceconfig.json counts. Fix: remove it if it is not "
        "of this job.",
    )


def _describe_error(error: ContractError, counts: str) -> str:
    """Returns a warning about a platform that does not count, from its error without the fix."""
    return f"{counts} counts, and a platform's variables are not used: {str(error).partition(' Fix: ')[0]}"


def _present(sources: Mapping[str, tuple[str, ...]], environ: Mapping[str, str]) -> list[str]:
    """Returns the sources of which a variable is set. An empty one counts only for `find_explicit`."""
    return [
        name
        for name, variables in sources.items()
        if any(variable in environ if name == _EXPLICIT else environ.get(variable) for variable in variables)
    ]


def _ask(name: str, environ: Mapping[str, str], hostname: str, root: str) -> HostList | None:
    """Imports the module of a source, and returns the hosts that it finds, checked."""
    module, _, function = name.partition(".")
    find = getattr(import_module(f"shoal_toolkit.discovery.{module}"), function)
    found: HostList | None = find(environ, hostname, root)
    if found is not None:
        from shoal_toolkit.discovery.host_list import check_hosts

        check_hosts(found.hosts, found.rank, found.source)
    return found


def _describe_disagreement(first: HostList, other: HostList, environ: Mapping[str, str]) -> str:
    """Returns a warning that SHOAL_HOSTS counts. Raises ContractError if neither of both sources is SHOAL_HOSTS."""
    found = " and ".join(
        f"{each.source} gives {len(each.hosts)} hosts and the rank {each.rank} ({each.evidence})"
        for each in (first, other)
    )
    if environ.get("SHOAL_HOSTS"):
        return f"{found}: {first.source} counts."
    raise ContractError(f"{found}. Fix: set SHOAL_HOSTS and SHOAL_HOST_RANK on every host.")
