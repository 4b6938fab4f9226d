"""Compares the facts of all hosts, and the measurements of the network between them, in pure functions.

A finding names the host, the problem and a fix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shoal_toolkit.fast_typing import Any, NamedTuple, Protocol
from shoal_toolkit.preflight.facts import FREE, PACKAGE

Facts = Mapping[str, Any]

_LEAST_FREE = 256 << 20  # bytes
_LEAST_SHM = 128 << 20  # bytes; Docker's default is 64 MiB
_LEAST_FILES = 1024
_LEAST_LOCKED = 1 << 30  # bytes
_MOST_SKEW = 30.0  # seconds; a message on a busy machine may be late by several
_MOST_MEASURED_SKEW_MS = 1000
_SLOW_FACTOR = 3  # a way that is slower than the median by more is a finding
_LEAST_WAYS = 6  # there are as many between three hosts; with fewer, nothing says which way is the slow one
_MAX_NAMED = 5  # hosts in one finding
_SYNCHRONISE = "synchronise the clocks (chrony or ntpd), which TLS and S3 need"
_SAME_IMAGE = "start the same image on every host"
_SAME_CODE = "give every host the same code and configuration"
_SAME_MACHINE = "use hosts of one kind"
# Facts that are equal on all hosts: fact → title, fix. The last group only counts if all hosts are of one kind.
_EQUAL = {
    "python": ("the version of Python", _SAME_IMAGE),
    "system": ("the system of the image", _SAME_IMAGE),
    "launcher": ("the launcher", _SAME_CODE),
    "forks": ("whether ranks are forked", "set SHOAL_STANDBY to one value on every host"),
    "world_size": ("the number of ranks of the job", f"{_SAME_CODE}, and as many GPUs"),
    "hyperparameters": ("the checksum of hyperparameters.json", _SAME_CODE),
    "script": ("the checksum of the script", _SAME_CODE),
    "mtu": ("the MTU of the network interface", "set the same MTU on every host: packets get lost otherwise"),
}
_EQUAL_MACHINES = {
    "gpus": ("the number of GPUs", f"{_SAME_MACHINE}, or give each container as many GPUs (--gpus)"),
    "gpu_model": ("the model of the GPUs", _SAME_MACHINE),
    "driver": ("the version of NVIDIA's driver", "install the same driver on every host"),
    "speed": ("the speed of the network interface in Mbit/s", "check its cable and its switch port"),
    "nics": ("the number of usable RDMA devices", "give each container /dev/infiniband"),
}

# Facts that are a problem themselves.
_PROBLEMS = {
    "port_problem": "allow all TCP ports between the hosts, and check that MASTER_ADDR has the same address on all",
    "port_taken": "end that process, or set another MASTER_PORT on every host",
}


class HostFinding(NamedTuple):
    """Something that is wrong on one or several hosts."""

    hosts: tuple[str, ...]
    problem: str
    fix: str

    def __str__(self) -> str:
        more = f" and {len(self.hosts) - _MAX_NAMED} more" if len(self.hosts) > _MAX_NAMED else ""
        return f"{', '.join(self.hosts[:_MAX_NAMED])}{more}: {self.problem}. Fix: {self.fix}."


def compare_facts(facts: Mapping[str, Facts], delays: Mapping[str, float], one_kind: bool = True) -> list[HostFinding]:
    """Returns a finding for each problem of the hosts: different facts, a bad fact, or a clock off by over 30 s.

    Args:
        facts: Host → facts, the first host first.
        delays: Host → seconds from its fact `time` until the first host had it, by the first host's clock.
        one_kind: Whether all hosts should have the same hardware: False if the job has several instance groups.

    Returns:
        The findings; empty if nothing is wrong.
    """
    equal = {**_EQUAL, **(_EQUAL_MACHINES if one_kind else {})}
    packages = sorted({name for each in facts.values() for name in each if name.startswith(PACKAGE)})
    equal.update({name: (f"the version of {name[len(PACKAGE) :]}", _SAME_IMAGE) for name in packages})
    found = [each for name, (title, fix) in equal.items() for each in _find_differences(facts, name, title, fix)]
    for host, each in facts.items():
        found += [HostFinding((host,), problem, fix) for problem, fix in _check_host(each)]
    for host, delay in delays.items():
        if abs(delay) > _MOST_SKEW:
            side = "behind" if delay > 0 else "ahead of"
            problem = f"its clock is {abs(delay):.0f} s {side} the clock of {next(iter(facts))}"
            found.append(HostFinding((host,), problem, _SYNCHRONISE))
    return found


def _find_differences(facts: Mapping[str, Facts], name: str, title: str, fix: str) -> list[HostFinding]:
    """Returns a finding for each value of a fact but the most frequent one. A missing fact is a value too."""
    groups: dict[object, list[str]] = {}
    for host, each in facts.items():
        groups.setdefault(each.get(name), []).append(host)
    if len(groups) < 2:
        return []
    usual = max(groups, key=lambda value: len(groups[value]))  # the first of equals
    return [
        HostFinding(
            tuple(hosts),
            f"{title} is {_show(value)}, and {_show(usual)} on {_name_hosts(groups[usual])}",
            fix,
        )
        for value, hosts in groups.items()
        if value != usual
    ]


def _show(value: object) -> object:
    return "unknown" if value is None else value


def _name_hosts(hosts: Sequence[str]) -> str:
    return hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts, such as {hosts[0]}"


def _check_host(facts: Facts) -> list[tuple[str, str]]:
    """Returns the problems of one host that show without the others, each with its fix."""
    found = []
    numbers = {name: value for name, value in facts.items() if type(value) is int}
    for name, free in numbers.items():
        if name.startswith(FREE) and free < _LEAST_FREE:
            found.append((f"{name[len(FREE) :]} has {free >> 20} MiB free", "free space or mount a larger volume"))
    several = numbers.get("ranks", 0) > 1 or numbers.get("gpus", 0) > 1
    if several and numbers.get("shm", _LEAST_SHM) < _LEAST_SHM:
        size = numbers["shm"] >> 20
        found.append(
            (f"/dev/shm has {size} MiB for several ranks", "docker run --shm-size 2g, or an emptyDir of medium Memory")
        )
    if numbers.get("nics", 0) and 0 <= numbers.get("memlock", -1) < _LEAST_LOCKED:
        limit = numbers["memlock"] >> 10
        found.append((f"RDMA needs locked memory, and its limit is {limit} KiB", "docker run --ulimit memlock=-1"))
    if missing := facts.get("efa_missing"):
        fix = "use an image with a tag that ends in -efa, with AWS's plugin, and pass the devices of /dev/infiniband"
        found.append((f"it has EFA, but NCCL uses TCP. Missing: {missing}", fix))
    if 0 <= numbers.get("files", -1) < _LEAST_FILES:
        found.append((f"a process can open {numbers['files']} files only", "docker run --ulimit nofile=65536"))
    if users := facts.get("other_users"):
        problem = f"other users (user IDs {users}) have processes on it, and the ports of ranks ask for no password"
        found.append((problem, "use whole hosts (sbatch --exclusive), or set SHOAL_MEMBERS_ONLY=1 on every host"))
    found += [(str(facts[name]), fix) for name, fix in _PROBLEMS.items() if facts.get(name)]
    return found


def describe_efa(facts: Mapping[str, Facts]) -> list[str]:
    """Returns a line with the state of EFA on each host, which equal hosts share, and one with the network of MPI."""
    hosts: dict[str, list[str]] = {}
    for host, each in facts.items():
        hosts.setdefault(str(each.get("efa", "unknown")), []).append(host)
    lines = [f"EFA        {state} ({_name_hosts(names)})" for state, names in hosts.items()]
    return [*lines, *(f"MPI        {each['mpi']}" for each in facts.values() if each.get("mpi"))]


class Way(Protocol):
    """A measurement from one host to another."""

    @property
    def microseconds(self) -> int:
        """The time there and back."""

    @property
    def bytes_per_second(self) -> int: ...

    @property
    def skew_ms(self) -> int:
        """How far the other host's clock is ahead."""

    @property
    def problem(self) -> str:
        """Why it was not measured; empty if it was."""


def check_network(first: str, ways: Mapping[tuple[str, str], Way]) -> list[HostFinding]:
    """Returns a finding for each way that failed or carries less than a third of the median, and each wrong clock.

    Rates are compared if at least six ways were measured, as between three hosts. A clock is wrong if the first host
    measured that it is off by more than 1 s.

    Args:
        first: The first host: its clock counts.
        ways: (from, to) → measurement.
    """
    found = [
        HostFinding(
            (one,),
            f"it cannot reach {other}: {way.problem}",
            "fix its name lookup, or allow all TCP ports between them",
        )
        for (one, other), way in ways.items()
        if way.problem
    ]
    measured = {pair: way for pair, way in ways.items() if not way.problem}
    rates = sorted(way.bytes_per_second for way in measured.values())
    usual = rates[len(rates) // 2] if len(rates) >= _LEAST_WAYS else 0
    for (one, other), way in measured.items():
        if way.bytes_per_second * _SLOW_FACTOR < usual:
            problem = (
                f"its way to {other} carries {_show_rate(way.bytes_per_second)}, and the median is {_show_rate(usual)}"
            )
            found.append(
                HostFinding((one,), problem, "check the cables, switch ports and cloud placement of both hosts")
            )
        if one == first and abs(way.skew_ms) > _MOST_MEASURED_SKEW_MS:
            side = "ahead of" if way.skew_ms > 0 else "behind"
            problem = f"its clock is {abs(way.skew_ms) / 1000:.1f} s {side} the clock of {first}"
            found.append(HostFinding((other,), problem, _SYNCHRONISE))
    return found


def describe_network(ways: Mapping[tuple[str, str], Way]) -> list[str]:
    """Returns lines with the median latency and bandwidth, and the slowest pair of each; none without measurements."""
    measured = {pair: way for pair, way in ways.items() if not way.problem}
    if not measured:
        return []
    late = sorted(measured, key=lambda pair: -measured[pair].microseconds)
    slow = sorted(measured, key=lambda pair: measured[pair].bytes_per_second)
    middle = len(measured) // 2
    return [
        f"latency    median {measured[late[middle]].microseconds / 1000:.2f} ms there and back, "
        f"slowest {late[0][0]} → {late[0][1]} {measured[late[0]].microseconds / 1000:.2f} ms",
        f"bandwidth  median {_show_rate(measured[slow[middle]].bytes_per_second)}, "
        f"slowest {slow[0][0]} → {slow[0][1]} {_show_rate(measured[slow[0]].bytes_per_second)}",
    ]


def _show_rate(bytes_per_second: int) -> str:
    return f"{bytes_per_second / 1e6:,.0f} MB/s"
