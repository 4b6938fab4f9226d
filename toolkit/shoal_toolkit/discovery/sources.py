"""Looks for the hosts of a job without resourceconfig.json in the variables of platforms, in their order.

To add a source, write a function of a module in this package, `(environ, hostname, root) -> HostList | None`, and add a
row to `host_list.SOURCES`: module.function and the variables that show its platform. The module is imported only if one
of these is set. The function cites the documentation of its variables, and raises ContractError if only some are there.
Rows of `HINTS` are asked last, and all of them: these name no hosts, and a host there trains alone with a warning.
docs/clusters.md has a table of the sources, and tests/toolkit/test_discovery.py has cases for each.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from shoal_toolkit.discovery.host_list import HINTS, SOURCES, HostList, list_present
from shoal_toolkit.discovery.variables import check_hosts
from shoal_toolkit.errors import ContractError


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
    hints = [_ask(name, environ, hostname, root) for name in list_present(HINTS, environ)]
    return next((hosts for hosts in hints if hosts is not None), None)


def _ask_sources(environ: Mapping[str, str], hostname: str, root: str) -> HostList | None:
    """Others than the first source that disagree are warnings with SHOAL_HOSTS, otherwise a ContractError."""
    found: list[HostList] = []
    broken: tuple[str, ...] = ()
    for name in list_present(SOURCES, environ):
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


def _ask(name: str, environ: Mapping[str, str], hostname: str, root: str) -> HostList | None:
    """Imports the module of a source, and returns the hosts that it finds, checked."""
    module, _, function = name.partition(".")
    find = getattr(import_module(f"shoal_toolkit.discovery.{module}"), function)
    found: HostList | None = find(environ, hostname, root)
    if found is not None:
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
