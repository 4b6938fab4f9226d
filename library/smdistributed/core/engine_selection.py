"""Selects the communication engine of a group: all ranks agree on one, and on the reason."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

from smdistributed.core.engines import Engine, TensorTransport
from smdistributed.core.exceptions import SMDDPError
from smdistributed.core.explain import CHOICES
from smdistributed.core.group_monitor import GroupMonitor
from smdistributed.core.members import Member, exchange_members
from smdistributed.core.network_engines import HierarchicalEngine, MonitoredEngine, NetworkEngine
from smdistributed.core.shm_engine import ShmEngine, open_shm_engine
from smdistributed.core.store import PrefixedStore, Store, exchange_texts


class Network(NamedTuple):
    name: str
    """As it appears in the name of the communication engine."""
    connect: Callable[[Sequence[int]], TensorTransport]
    """Connects the given ranks of the group; all of them call it with the same list."""


class RankGroup(NamedTuple):
    store: Store
    """The group's own."""
    rank: int
    size: int
    seconds: float
    """How long ranks wait for each other."""
    connect: Callable[[], Store]
    """Opens the job's store for another thread, which must not wait for calls of this one."""
    number: int
    """This rank in the job, which messages show."""
    is_first: bool = True
    """Whether this is the job's first group, which compares the clocks of its hosts."""


def open_engine(group: RankGroup, network: Network, requested: str = "auto") -> tuple[Engine, str]:
    """Opens the communication engine of a group; all its ranks call this and wait for each other.

    `network` connects ranks that share no memory. `requested` is the value of SMDDP_ENGINE: "gloo" never uses shared
    memory. If several hosts take part, or no memory is shared, a `GroupMonitor` watches the group in a thread.

    Returns the communication engine, and its name with the reason for the choice. Raises SMDDPError if shared memory
    is requested and unavailable, or a rank cannot load the C engine or connect. Raises CollectiveError if
    SMDDP_STALL_SECONDS is invalid.
    """
    members = exchange_members(group.store, group.rank, group.size, group.number)
    for other, member in enumerate(members):
        if member.problem:
            raise SMDDPError(
                f"Rank {other} cannot load the C engine: {member.problem}. Fix: install smdistributed's wheel "
                "for this platform."
            )
    grid = _group_by_host(members)
    local, problem = None, "requested by SMDDP_ENGINE"
    if requested != "gloo":
        local, problem = _open_local(group, members, grid)
    if local is not None and len(grid) == 1:
        return local, f"shm: {_counted(group.size, 'rank')} on one host"
    if local is None and requested == "shm":
        raise SMDDPError(
            f"SMDDP_ENGINE=shm, but the ranks cannot share memory ({problem}). Fix: unset it; gloo then joins them."
        )
    monitor = GroupMonitor(group.rank, members, group.seconds, group.connect, group.is_first)
    everybody = NetworkEngine(network.connect(range(group.size)), group.rank, group.size, monitor.message_tag)
    if local is None:
        return MonitoredEngine(everybody, monitor), f"{network.name}: {problem}"
    column = [ranks[local.rank] for ranks in grid]
    across = NetworkEngine(network.connect(column), column.index(group.rank), len(grid), monitor.message_tag)
    engine = HierarchicalEngine(local, across, everybody, grid, group.rank)
    name = f"shm+{network.name}: {len(grid)} hosts × {_counted(local.size, 'rank')}"
    return MonitoredEngine(engine, monitor), name


def requested_engine(choices: Sequence[str] = CHOICES) -> str:
    """Reads SMDDP_ENGINE; "auto" if it is unset or empty. Raises SMDDPError if it is not one of `choices`."""
    requested = os.environ.get("SMDDP_ENGINE") or "auto"
    if requested not in choices:
        raise SMDDPError(
            f"SMDDP_ENGINE={requested!r} is not a communication engine. Fix: use one of {', '.join(choices)}."
        )
    return requested


def _group_by_host(members: Sequence[Member]) -> list[list[int]]:
    found: dict[str, list[int]] = {}
    for rank, member in enumerate(members):
        found.setdefault(member.process.host, []).append(rank)
    return list(found.values())


def _open_local(
    group: RankGroup, members: Sequence[Member], grid: Sequence[Sequence[int]]
) -> tuple[ShmEngine | None, str]:
    """Opens the shm engine of this rank's host, or returns None and why: a problem on one host is a problem for all."""

    counts = {len(ranks) for ranks in grid}
    if len(counts) > 1:
        return None, "the hosts have different numbers of ranks"
    if counts == {1} and len(grid) > 1:
        return None, "one rank on each host"
    mine = next(ranks for ranks in grid if group.rank in ranks)
    here, monitored = [members[other] for other in mine], len(grid) > 1
    store = PrefixedStore(group.store, f"host-{mine[0]}")
    local = open_shm_engine(store, mine.index(group.rank), here, group.seconds, monitored)
    problem = local if isinstance(local, str) else ""
    if len(grid) > 1:
        texts = exchange_texts(group.store, "shared", group.rank, group.size, problem)
        problem = next((f"on the host of rank {other}: {text}" for other, text in enumerate(texts) if text), "")
    if problem or isinstance(local, str):
        return None, problem
    return local, ""


def _counted(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
