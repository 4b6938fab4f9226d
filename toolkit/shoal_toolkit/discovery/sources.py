"""Looks for the hosts of a job without resourceconfig.json in the variables of platforms, in their order.

To add a source, write a function of a module in this package, `(environ, hostname, root) -> HostList | None`, and add a
row to `host_list.SOURCES`: module.function and the variables that show its platform. The module is imported only if one
of these is set. The function cites the documentation of its variables, and raises ContractError if only some are there.
Rows of `HINTS` are asked last, and all of them: these name no hosts, and a host there trains alone with a warning.
docs/clusters.md has a table of the sources, and tests/toolkit/test_discovery.py has cases for each.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib import import_module

from shoal_toolkit.discovery.host_list import HINTS, SOURCES, HostList, list_present
from shoal_toolkit.errors import ContractError

EXPLICIT = "set SHOAL_HOSTS and SHOAL_HOST_RANK on every host"
_NAME = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?"
_MAX_HOSTS = 65536
_ITEM = re.compile(r"(?:[^\[\],\s]|\[[^\[\]]*\])+")
_PART = re.compile(r"\[([^\]]*)\]|([^\[]+)")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")


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


# For the modules of sources


def fold(name: str) -> str:
    """Returns the name of a host as DNS compares it: in lower case, without the dot at the end."""
    return name.rstrip(".").lower()


def shorten(name: str) -> str:
    """Returns the folded name of a host without its domain. An IPv4 address stays whole."""
    folded = fold(name)
    return folded if re.fullmatch(r"[0-9.]+", folded) else folded.partition(".")[0]


def is_local(address: str) -> bool:
    """Returns whether MASTER_ADDR is a loopback address, or empty."""
    return address in ("", "localhost", "::1") or address.startswith("127.")


def read_number(environ: Mapping[str, str], name: str, least: int = 0) -> int | None:
    """Returns a variable that is a whole number; None if it is not set or empty.

    Raises:
        ContractError: If it is something else, or less than `least`.
    """
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdecimal()) or int(text) < least:
        raise ContractError(
            f"The variable {name} is {text!r}; it must be a whole number of at least {least}. Fix: set it so."
        )
    return int(text)


def require(environ: Mapping[str, str], name: str, source: str, least: int = 0) -> int:
    """Returns a variable that is a whole number.

    Raises ContractError if it is missing, something else, or below `least`.
    """
    number = read_number(environ, name, least)
    if number is None:
        raise ContractError(
            f"{source}: the variable {name} is missing, although others of this platform are set. Fix: pass all of "
            f"them into the container, or {EXPLICIT}."
        )
    return number


def check_hosts(hosts: Sequence[str], rank: int, source: str) -> None:
    """Checks the names of the hosts, and that each is there once and this host is among them.

    Raises:
        ContractError: If not.
    """
    wrong = [host for host in hosts if not re.fullmatch(_NAME, host)]
    if wrong or not hosts:
        raise ContractError(
            f"{source} gives the hosts {list(hosts)}. {'There are none' if not wrong else f'{wrong[0]!r} is wrong'}. "
            "Fix: write names or IPv4 addresses."
        )
    folded = [fold(host) for host in hosts]
    if len(set(folded)) != len(hosts):
        twice = next(host for host in hosts if folded.count(fold(host)) > 1)
        raise ContractError(f"{source} names the host {twice!r} twice: {list(hosts)}. Fix: name each host once.")
    if not 0 <= rank < len(hosts):
        raise ContractError(
            f"{source} gives this host the rank {rank}, and the job has {len(hosts)} hosts: {list(hosts)}. "
            f"Ranks are 0 to {len(hosts) - 1}. Fix: {EXPLICIT}."
        )


def show(environ: Mapping[str, str], *names: str) -> str:
    """Returns the variables that are set as evidence, such as "SLURM_NODEID=0, SLURM_STEP_NODELIST=n[1-2]"."""
    return ", ".join(f"{name}={' '.join(environ[name].split())}" for name in names if environ.get(name))


def expand_hosts(text: str, variable: str) -> tuple[str, ...]:
    """Returns the names of a list: commas or spaces separate names, brackets hold numbers ("n[01-02],m": n01, n02, m).

    Slurm's manual describes the form: "hostlist expressions" (scontrol, "show hostnames"). Of several brackets in a
    name, the last varies fastest. The digits of the first number of a range set the padding.

    Args:
        text: Such as "n[1-3],m".
        variable: The name of the variable that holds it, for errors.

    Raises:
        ContractError: If the text has another form, or more than 65,536 names.
    """
    items = _ITEM.findall(text)
    if re.sub(r"[,\s]", "", _ITEM.sub("", text)) or not items:
        raise _wrong(text, variable, "is not a list of host names")
    names: list[str] = []
    for item in items:
        found = [""]
        for ranges, literal in _PART.findall(item):
            ends = [literal] if literal else _expand_ranges(ranges, text, variable)
            if len(found) * len(ends) + len(names) > _MAX_HOSTS:
                raise _wrong(text, variable, f"names more than {_MAX_HOSTS:,} hosts")
            found = [name + end for name in found for end in ends]
        names += found
    return tuple(names)


def _expand_ranges(ranges: str, text: str, variable: str) -> list[str]:
    """Returns the numbers between two brackets, padded: "08-10,3" → 08, 09, 10, 3."""
    numbers: list[str] = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise _wrong(text, variable, f"has [{ranges}], and {part!r} is neither a number nor a range")
        low, high = int(match[1]), int(match[2] or match[1])
        if not low <= high < low + _MAX_HOSTS:
            raise _wrong(text, variable, f"has the range {part}, which must go up, by less than {_MAX_HOSTS:,}")
        numbers += [str(number).zfill(len(match[1])) for number in range(low, high + 1)]
    return numbers


def _wrong(text: str, variable: str, problem: str) -> ContractError:
    shown = text if len(text) <= 200 else f"{text[:200]}..."
    return ContractError(
        f"The variable {variable} {problem}: {shown!r}. Fix: write names, separated by commas, with ranges in "
        "brackets, such as node[01-04],login1."
    )
