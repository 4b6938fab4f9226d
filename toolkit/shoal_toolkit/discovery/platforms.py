"""Sources of hosts: SHOAL_HOSTS, AWS Batch, SkyPilot, Ray, and the variables of a rank.

Each part cites the documentation of its variables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shoal_toolkit.discovery.host_list import HostList, Registration
from shoal_toolkit.discovery.kubernetes import SECRET
from shoal_toolkit.discovery.sources import (
    EXPLICIT,
    expand_hosts,
    fold,
    is_local,
    read_number,
    require,
    shorten,
    show,
)
from shoal_toolkit.errors import ContractError

# SHOAL_HOSTS lists the hosts, and SHOAL_HOST_RANK is the index of this one. They count before a platform.
#
# Without SHOAL_HOST_RANK, the rank is the index of this pod in an Indexed Job, JOB_COMPLETION_INDEX. Kubernetes
# documents it under "Indexed Job". On other platforms it is the index of the only entry with this host's name. This
# index counts before JOB_COMPLETION_INDEX too: a JobSet has several Jobs, and each counts its pods from 0.

_HOSTS, _HOST_RANK, _POD_INDEX = "SHOAL_HOSTS", "SHOAL_HOST_RANK", "JOB_COMPLETION_INDEX"


def find_explicit(environ: Mapping[str, str], hostname: str, root: str) -> HostList | None:
    """Returns the hosts of SHOAL_HOSTS. Raises ContractError if the list is missing or wrong, or the rank unknown."""
    if not environ.get(_HOSTS):
        values = " and ".join(f"{name} is {environ[name]!r}" for name in (_HOST_RANK, _HOSTS) if name in environ)
        missing = "" if _HOSTS in environ else f", and {_HOSTS} is not set"
        raise ContractError(
            f"The variable {values}{missing}. Fix: set {_HOSTS} to all hosts of the job, in the same order on every "
            f"host, such as node[1-2]. For one host, unset {_HOSTS} and {_HOST_RANK}."
        )
    hosts = expand_hosts(environ[_HOSTS], _HOSTS)
    name = _HOST_RANK if environ.get(_HOST_RANK) or not environ.get(_POD_INDEX) else _POD_INDEX
    rank = read_number(environ, name)
    evidence = show(environ, _HOSTS, name)
    named = _find_by_name(hosts, hostname) if name == _POD_INDEX else []
    if rank is None or (len(named) == 1 and named[0] != rank):
        rank, evidence = _find_rank(hosts, hostname), f"{evidence}, this host is {hostname}"
    return HostList(_HOSTS, hosts, rank, evidence, SECRET if environ.get("KUBERNETES_SERVICE_HOST") else "")


def _find_by_name(hosts: Sequence[str], hostname: str) -> list[int]:
    same = [rank for rank, host in enumerate(hosts) if fold(host) == fold(hostname)]
    return same or [rank for rank, host in enumerate(hosts) if shorten(host) == shorten(hostname)]


def _find_rank(hosts: Sequence[str], hostname: str) -> int:
    """Returns the index of this host by its name; 0 for a job of one host. Raises ContractError if it is unknown."""
    if len(hosts) == 1:
        return 0
    same = _find_by_name(hosts, hostname)
    if len(same) != 1:
        raise ContractError(
            f"{_HOSTS} lists {', '.join(hosts)}, and {'none' if not same else 'several'} of them have this host's name "
            f"{hostname}. Fix: set {_HOST_RANK} on each host to its index in the list, from 0 on."
        )
    return same[0]


# AWS Batch: the nodes of a multi-node parallel job.
#
# The variables are in the AWS Batch User Guide, "AWS Batch job environment variables" and "Multi-node parallel jobs".
# AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS is set on child nodes only, and no node knows the addresses of the
# children. So the children register with the main node when the job starts: see `hosts/registration.py`.

_BATCH_SOURCE = "AWS Batch"
_BATCH_COUNT, _BATCH_INDEX = "AWS_BATCH_JOB_NUM_NODES", "AWS_BATCH_JOB_NODE_INDEX"
_BATCH_MAIN_INDEX = "AWS_BATCH_JOB_MAIN_NODE_INDEX"
_BATCH_MAIN_ADDRESS = "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"
_BATCH_SECRET = (
    "On AWS Batch, name a secret of AWS Secrets Manager in the job definition's `secrets`, as the variable "
    "SHOAL_JOB_SECRET."
)


def find_aws_batch(environ: Mapping[str, str], hostname: str, root: str) -> HostList | None:
    """Returns the nodes, the main node first, under names that last until they have registered.

    Raises:
        ContractError: If a variable is missing or wrong.
    """
    count = require(environ, _BATCH_COUNT, _BATCH_SOURCE, 1)
    if count == 1:
        return HostList(_BATCH_SOURCE, (hostname,), 0, show(environ, _BATCH_COUNT), _BATCH_SECRET)
    index, main = require(environ, _BATCH_INDEX, _BATCH_SOURCE), require(environ, _BATCH_MAIN_INDEX, _BATCH_SOURCE)
    if max(index, main) >= count:
        raise ContractError(
            f"{_BATCH_SOURCE}: {show(environ, _BATCH_INDEX, _BATCH_MAIN_INDEX, _BATCH_COUNT)}: an index is below the "
            f"number. Fix: pass all AWS_BATCH_* variables into the container as AWS Batch sets them, or {EXPLICIT}."
        )
    address = environ.get(_BATCH_MAIN_ADDRESS, "")
    if index != main and not address:
        raise ContractError(
            f"{_BATCH_SOURCE}: this is a child node, and the variable {_BATCH_MAIN_ADDRESS} is missing. Fix: pass all "
            "AWS_BATCH_* variables to `train`."
        )
    order = [main, *(number for number in range(count) if number != main)]
    return HostList(
        _BATCH_SOURCE,
        tuple(f"node-{number}" for number in order),
        order.index(index),
        show(environ, _BATCH_COUNT, _BATCH_INDEX, _BATCH_MAIN_INDEX, _BATCH_MAIN_ADDRESS),
        _BATCH_SECRET,
        ("the names of the hosts stand for addresses that the nodes exchange when the job starts",),
        registration=Registration(
            "" if index == main else address, environ.get("AWS_BATCH_JOB_ID", "").partition("#")[0]
        ),
    )


# SkyPilot: the nodes of a task.
#
# SKYPILOT_NODE_IPS (one address a line), SKYPILOT_NODE_RANK, SKYPILOT_NUM_NODES and SKYPILOT_NUM_GPUS_PER_NODE are in
# SkyPilot's documentation, "Distributed Multi-Node Jobs" and "Environment Variables".

_SKY_SOURCE = "SkyPilot"
_SKY_LIST, _SKY_RANK, _SKY_COUNT = "SKYPILOT_NODE_IPS", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES"
_SKY_SECRET = (
    'On SkyPilot, start the task with `sky launch --secret SHOAL_JOB_SECRET="$(openssl rand -hex 32)"`, or with --env '
    "in versions without --secret."
)


def find_skypilot(environ: Mapping[str, str], hostname: str, root: str) -> HostList | None:
    """Returns the nodes of the task. Raises ContractError if a variable is missing, or their number differs."""
    if not environ.get(_SKY_LIST):
        raise ContractError(
            f"{_SKY_SOURCE}: {show(environ, _SKY_RANK, _SKY_COUNT)}, and {_SKY_LIST} is not set. Fix: pass all "
            f"SKYPILOT_* variables into the container, or {EXPLICIT}."
        )
    hosts = expand_hosts(environ[_SKY_LIST], _SKY_LIST)
    count = read_number(environ, _SKY_COUNT, 1)
    if count not in (None, len(hosts)):
        raise ContractError(f"{_SKY_SOURCE}: {show(environ, _SKY_COUNT, _SKY_LIST)}: these disagree. Fix: {EXPLICIT}.")
    return HostList(
        _SKY_SOURCE, hosts, require(environ, _SKY_RANK, _SKY_SOURCE), show(environ, _SKY_LIST, _SKY_RANK), _SKY_SECRET
    )


# Ray: it names no hosts in variables, so that a host on it trains alone, with a warning.
#
# Ray sets RAY_JOB_ID for a driver's processes, and reads RAY_ADDRESS ("Environment variables", in Ray's documentation).
# The nodes are only in its API: ray.nodes(). Code that starts `train` on each node can set SHOAL_HOSTS from it.


def find_ray(environ: Mapping[str, str], hostname: str, root: str) -> HostList | None:
    """Returns this host alone, with a warning."""
    evidence = show(environ, "RAY_ADDRESS", "RAY_JOB_ID")
    warning = (
        f"Ray ({evidence}) names no hosts in variables: a single host is assumed. Fix, for several hosts: start one "
        "`train` on each node. Set SHOAL_HOSTS to the NodeManagerAddress of each entry of ray.nodes(), and "
        "SHOAL_HOST_RANK to the node's index."
    )
    return HostList("Ray", (hostname,), 0, evidence, warnings=(warning,))


# Variables of a process that mpirun or torchrun started, without a platform that names the hosts.
#
# torchrun and several schedulers set WORLD_SIZE, RANK and MASTER_ADDR ("torchrun", in PyTorch's documentation). They
# name only one host, and count processes or hosts. Open MPI's mpirun sets OMPI_COMM_WORLD_SIZE, MPICH's and Intel's
# PMI_SIZE. `train` runs once on each host and starts the ranks itself: as one of several ranks it would train once for
# each.

_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "LOCAL_WORLD_SIZE")
_ELASTIC = "TORCHELASTIC_RUN_ID"


def find_rank_variables(environ: Mapping[str, str], hostname: str, root: str) -> HostList | None:
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
            f"Variables of a rank ({evidence}) do not name the hosts of the job. Fix, for several hosts: {EXPLICIT}; "
            "`train` sets these variables for the script itself. Fix, for one host: unset them."
        )
    warning = (
        f"variables of a rank ({evidence}) do not name the hosts of the job: a single host is assumed. Fix, for "
        f"several hosts: {EXPLICIT}. `train` sets these variables for the script itself."
    )
    return HostList("torch.distributed", (hostname,), 0, evidence, warnings=(warning,))


def _check_launcher(environ: Mapping[str, str], several: bool) -> None:
    names = [name for name in _SIZES if (read_number(environ, name) or 1) > 1]
    names += [_ELASTIC, "WORLD_SIZE"] if several and environ.get(_ELASTIC) else []
    if names:
        raise ContractError(
            f"mpirun or torchrun has started `train` as one of several ranks ({show(environ, *names)}). "
            "`train` runs once on each host, and starts the ranks itself. Fix: start `train` without mpirun and "
            f"torchrun; sagemaker_mpi_num_of_processes_per_host is the number of ranks. For several hosts, {EXPLICIT}."
        )
