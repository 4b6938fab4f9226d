"""The hosts of a job as a platform describes them, and the functions by which sources read and check variables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shoal_toolkit.errors import ContractError

EXPLICIT = "set SHOAL_HOSTS and SHOAL_HOST_RANK on every host"
_NAME = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?"


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
            f"Ranks are 0 to {len(hosts) - 1}."
        )


def show(environ: Mapping[str, str], *names: str) -> str:
    """Returns the variables that are set as evidence, such as "SLURM_NODEID=0, SLURM_STEP_NODELIST=n[1-2]"."""
    return ", ".join(f"{name}={' '.join(environ[name].split())}" for name in names if environ.get(name))
