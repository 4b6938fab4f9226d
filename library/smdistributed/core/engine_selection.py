"""Which engine a group has: all its ranks agree on one, and can say why."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

from smdistributed.core import reductions as compiled
from smdistributed.core.board import CountingStore
from smdistributed.core.engines import NetworkEngine, Engine, Transport, ShmEngine, HierarchicalEngine, MonitoredEngine
from smdistributed.core.exceptions import SMDDPError
from smdistributed.core.explain import CHOICES
from smdistributed.core.reductions import Reductions
from smdistributed.core.shared_memory import Member, SharedMemory, exchange, meet, share
from smdistributed.core.store import Prefixed
from smdistributed.core.watch import Watch


class Network(NamedTuple):
    """What carries messages between the ranks of a group where they share no memory."""

    name: str
    """As it is called in the engine's name."""
    across: Callable[[Sequence[int]], Transport]
    """Connects those ranks of the group, of which the caller is one; all of them call it, with the same list."""


class RankGroup(NamedTuple):
    """The ranks that shall have an engine, as one of them sees them."""

    store: CountingStore
    """Of this group alone."""
    rank: int
    size: int
    seconds: float
    """How long ranks wait for each other."""
    connect: Callable[[], CountingStore]
    """The job's store, for a thread of its own: what another thread waits for there must not keep it."""
    number: int
    """This rank's in the job, by which people know it."""
    is_first: bool = True
    """Whether this is the job's first group, which compares the clocks of its hosts."""


def open_engine(
    group: RankGroup, network: Network, wanted: str = "auto", reductions: Reductions = compiled
) -> tuple[Engine, str]:
    """Return the engine of a group, and its name with the reason. All ranks of the group call this.

    wanted: what SMDDP_ENGINE asks for (`requested_engine`); "gloo": the network alone. reductions: how a rank reduces
    where it shares no memory.

    Raises SMDDPError when shared memory is asked for, and there is none.
    """
    members = meet(group.store, group.rank, group.size, group.number)
    grid = _hosts(members)
    local, problem = None, "SMDDP_ENGINE asks for it"
    if wanted != "gloo":
        local, problem = _open_local(group, members, grid)
    if local is not None and len(grid) == 1:
        return ShmEngine(local), f"shm: {_counted(group.size, 'rank')} on one host"
    if local is None and wanted == "shm":
        raise SMDDPError(f"SMDDP_ENGINE=shm, and the ranks share no memory ({problem}).")
    watch = Watch(group.rank, members, group.seconds, group.connect, group.is_first)
    everybody = NetworkEngine(network.across(range(group.size)), group.rank, group.size, watch.tag, reductions)
    if local is None:
        return MonitoredEngine(everybody, watch), f"{network.name}: {problem}"
    column = [ranks[local.rank] for ranks in grid]
    across = NetworkEngine(network.across(column), column.index(group.rank), len(grid), watch.tag)
    return MonitoredEngine(HierarchicalEngine(ShmEngine(local), across, everybody, grid, group.rank), watch), (
        f"shm+{network.name}: {len(grid)} hosts × {_counted(local.size, 'rank')}"
    )


def requested_engine(choices: Sequence[str] = CHOICES) -> str:
    """The value of SMDDP_ENGINE. Raises SMDDPError when it is none of those that a framework has."""
    wanted = os.environ.get("SMDDP_ENGINE") or "auto"
    if wanted not in choices:
        raise SMDDPError(f"SMDDP_ENGINE={wanted!r} is not an engine: use one of {', '.join(choices)}.")
    return wanted


def _hosts(members: Sequence[Member]) -> list[list[int]]:
    """The ranks of each host, in the order in which the hosts come."""
    found: dict[str, list[int]] = {}
    for rank, member in enumerate(members):
        found.setdefault(member.process.host, []).append(rank)
    return list(found.values())


def _open_local(
    group: RankGroup, members: Sequence[Member], grid: Sequence[Sequence[int]]
) -> tuple[SharedMemory | None, str]:
    """The memory of this rank's host, or why no host shall have any; one of the two on all ranks."""
    problems = [f"rank {other}: {member.problem}" for other, member in enumerate(members) if member.problem]
    if problems:
        return None, problems[0]
    counts = {len(ranks) for ranks in grid}
    if len(counts) > 1:
        return None, "the hosts hold different numbers of ranks"
    if counts == {1} and len(grid) > 1:
        return None, "one rank on each host"
    mine = next(ranks for ranks in grid if group.rank in ranks)
    here, watched = [members[other] for other in mine], len(grid) > 1
    local = share(Prefixed(group.store, f"host-{mine[0]}"), mine.index(group.rank), here, group.seconds, watched)
    problem = local if isinstance(local, str) else ""
    if len(grid) > 1:
        told = exchange(group.store, "shared", group.rank, group.size, problem)
        problem = next((f"on the host of rank {other}: {text}" for other, text in enumerate(told) if text), "")
    if problem or isinstance(local, str):
        return None, problem
    return local, ""


def _counted(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
