"""Which engine a group has: all its ranks agree on one, and can say why."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from smdistributed.core.exceptions import SMDDPError
from smdistributed.core.explain import CHOICES
from smdistributed.core.shared_memory import Member, SharedMemory, exchange, meet, share
from smdistributed.core.torch.devices import refusal, without_nccl
from smdistributed.core.torch.engines import AcrossHosts, Engine, OnHost, OnHosts, Watched
from smdistributed.core.torch.mpi import open_mpi
from smdistributed.core.torch.rendezvous import beside
from smdistributed.core.watch import Watch


def open_engine(store: Store, rank: int, size: int, timeout: timedelta, gloo: object) -> tuple[Engine, str]:
    """Return the engine of a group, and its name with the reason; SMDDP_ENGINE may ask for one (`CHOICES`).

    store: of this group alone. gloo: torch's own group of the same ranks.

    Raises SMDDPError when SMDDP_ENGINE is none of them, or asks for shared memory or NCCL that there is none of.
    """
    wanted = _wanted(store, rank, size)
    members = meet(store, rank, size, dist.get_rank() if dist.is_initialized() else rank)
    grid = _hosts(members)
    local, problem = None, "SMDDP_ENGINE asks for it"
    if wanted != "gloo":
        local, problem = _open_local(store, rank, members, grid, timeout)
    if local is not None and len(grid) == 1:
        return OnHost(local), f"shm: {_counted(size, 'rank')} on one host"
    if local is None and wanted == "shm":
        raise SMDDPError(f"SMDDP_ENGINE=shm, and the ranks share no memory ({problem}).")
    mover, name = (open_mpi(store, rank, range(size), timeout), "mpi") if wanted == "mpi" else (gloo, "gloo")
    watch = Watch(rank, members, timeout.total_seconds(), lambda: beside(store), clocks=not dist.is_initialized())
    everybody = AcrossHosts(mover, rank, size, watch.tag)
    if local is None:
        return Watched(everybody, watch), f"{name}: {problem}"
    column = local.rank
    host = next(host for host, ranks in enumerate(grid) if rank in ranks)
    between: object
    if wanted == "mpi":
        between = open_mpi(store, rank, [ranks[column] for ranks in grid], timeout)
    else:
        between = dist.ProcessGroupGloo(PrefixStore(f"across-{column}", store), host, len(grid), timeout)
    across = AcrossHosts(between, host, len(grid), watch.tag)
    return Watched(OnHosts(OnHost(local), across, everybody, grid, rank), watch), (
        f"shm+{name}: {len(grid)} hosts × {_counted(local.size, 'rank')}"
    )


def _wanted(store: Store, rank: int, size: int) -> str:
    """The value of SMDDP_ENGINE, if it is one that can be had as far as CUDA devices go."""
    wanted = os.environ.get("SMDDP_ENGINE") or "auto"
    if wanted not in CHOICES:
        raise SMDDPError(f"SMDDP_ENGINE={wanted!r} is not an engine: use one of {', '.join(CHOICES)}.")
    problem = without_nccl(PrefixStore("nccl", store), rank, size) if wanted == "nccl" else ""
    if problem:
        raise refusal(problem)
    return wanted


def _hosts(members: Sequence[Member]) -> list[list[int]]:
    """The ranks of each host, in the order in which the hosts come."""
    found: dict[str, list[int]] = {}
    for rank, member in enumerate(members):
        found.setdefault(member.process.host, []).append(rank)
    return list(found.values())


def _open_local(
    store: Store, rank: int, members: Sequence[Member], grid: Sequence[Sequence[int]], timeout: timedelta
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
    mine = next(ranks for ranks in grid if rank in ranks)
    here, watched = [members[other] for other in mine], len(grid) > 1
    local = share(PrefixStore(f"host-{mine[0]}", store), mine.index(rank), here, timeout.total_seconds(), watched)
    problem = local if isinstance(local, str) else ""
    if len(grid) > 1:
        told = exchange(store, "shared", rank, len(members), problem)
        problem = next((f"on the host of rank {other}: {text}" for other, text in enumerate(told) if text), "")
    if problem or isinstance(local, str):
        return None, problem
    return local, ""


def _counted(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
