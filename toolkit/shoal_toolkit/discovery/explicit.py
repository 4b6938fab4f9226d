"""SHOAL_HOSTS lists the hosts, and SHOAL_HOST_RANK is the index of this one. They count before a platform.

Without SHOAL_HOST_RANK, the rank is the index of this pod in an Indexed Job, JOB_COMPLETION_INDEX. Kubernetes documents
it under "Indexed Job". On other platforms it is the index of the only entry with this host's name. This index counts
before JOB_COMPLETION_INDEX too: a JobSet has several Jobs, and each counts its pods from 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shoal_toolkit.discovery.host_list import HostList, fold, read_number, shorten, show
from shoal_toolkit.discovery.host_names import expand_hosts
from shoal_toolkit.errors import ContractError

_LIST, _RANK, _INDEX = "SHOAL_HOSTS", "SHOAL_HOST_RANK", "JOB_COMPLETION_INDEX"


def find(environ: Mapping[str, str], hostname: str, root: str) -> HostList | None:
    """Returns the hosts of SHOAL_HOSTS. Raises ContractError if the list is missing or wrong, or the rank unknown."""
    if not environ.get(_LIST):
        values = " and ".join(f"{name} is {environ[name]!r}" for name in (_RANK, _LIST) if name in environ)
        missing = "" if _LIST in environ else f", and {_LIST} is not set"
        raise ContractError(
            f"The variable {values}{missing}. Fix: set {_LIST} to all hosts of the job, in the same order on every "
            f"host, such as node[1-2]. For one host, unset {_LIST} and {_RANK}."
        )
    hosts = expand_hosts(environ[_LIST], _LIST)
    name = _RANK if environ.get(_RANK) or not environ.get(_INDEX) else _INDEX
    rank = read_number(environ, name)
    evidence = show(environ, _LIST, name)
    named = _find_by_name(hosts, hostname) if name == _INDEX else []
    if rank is None or (len(named) == 1 and named[0] != rank):
        rank, evidence = _find_rank(hosts, hostname), f"{evidence}, this host is {hostname}"
    return HostList(_LIST, hosts, rank, evidence, _secret(environ))


def _secret(environ: Mapping[str, str]) -> str:
    """Returns how Kubernetes gives pods a secret; empty outside Kubernetes."""
    if not environ.get("KUBERNETES_SERVICE_HOST"):
        return ""
    from shoal_toolkit.discovery.kubernetes import SECRET

    return SECRET


def _find_by_name(hosts: Sequence[str], hostname: str) -> list[int]:
    """Returns the indexes of the entries with this host's name; if there are none, with or without its domain."""
    same = [rank for rank, host in enumerate(hosts) if fold(host) == fold(hostname)]
    return same or [rank for rank, host in enumerate(hosts) if shorten(host) == shorten(hostname)]


def _find_rank(hosts: Sequence[str], hostname: str) -> int:
    """Returns the index of this host by its name; 0 for a job of one host. Raises ContractError if it is unknown."""
    if len(hosts) == 1:
        return 0
    same = _find_by_name(hosts, hostname)
    if len(same) != 1:
        raise ContractError(
            f"{_LIST} lists {', '.join(hosts)}, and {'none' if not same else 'several'} of them have this host's name "
            f"{hostname}. Fix: set {_RANK} on each host to its index in the list, from 0 on."
        )
    return same[0]
