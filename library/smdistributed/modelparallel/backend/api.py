"""Ranks, groups and messages: the functions of `smp` that are the same for every framework (AWS API).

All functions but `is_initialized` raise StepUsageError before `smp.init`.
"""

from __future__ import annotations

import enum
from typing import Any

from smdistributed.modelparallel.backend.context import current_context

__all__ = ["CommGroup", "DP_GROUP", "MP_GROUP", "PP_GROUP", "RDP_GROUP", "RankType", "TP_GROUP", "WORLD"]
__all__ += ["allgather", "barrier", "broadcast", "dp_barrier", "dp_rank", "dp_size", "get_dp_group", "get_mp_group"]
__all__ += ["get_pp_group", "get_rdp_group", "get_tp_group", "is_initialized", "local_rank", "local_size"]
__all__ += ["mp_barrier", "mp_rank", "mp_size", "pp_barrier", "pp_rank", "pp_size", "rank", "rdp_barrier"]
__all__ += ["rdp_rank", "rdp_size", "recv_from", "send", "size", "tp_barrier", "tp_rank", "tp_size"]


class CommGroup(enum.Enum):
    """Groups of ranks (AWS API)."""

    WORLD = "WORLD"
    MP_GROUP = "MP_GROUP"
    DP_GROUP = "DP_GROUP"
    PP_GROUP = "PP_GROUP"
    TP_GROUP = "TP_GROUP"
    RDP_GROUP = "RDP_GROUP"


class RankType(enum.Enum):
    """Ways to number ranks: in the job, or in this rank's group of that name (AWS API)."""

    WORLD_RANK = "WORLD"
    MP_RANK = "MP_GROUP"
    DP_RANK = "DP_GROUP"
    PP_RANK = "PP_GROUP"
    TP_RANK = "TP_GROUP"
    RDP_RANK = "RDP_GROUP"


WORLD, MP_GROUP, DP_GROUP = CommGroup.WORLD, CommGroup.MP_GROUP, CommGroup.DP_GROUP
PP_GROUP, TP_GROUP, RDP_GROUP = CommGroup.PP_GROUP, CommGroup.TP_GROUP, CommGroup.RDP_GROUP


def is_initialized() -> bool:
    """Whether `init` has been called."""
    return current_context().initialized


def _rank(name: str) -> int:
    return current_context().group(name).index(current_context().rank)


def _size(name: str) -> int:
    return len(current_context().group(name))


def rank() -> int:
    """This process's number in the job, from 0."""
    return _rank("WORLD")


def size() -> int:
    """The number of processes of the job."""
    return _size("WORLD")


def local_rank() -> int:
    """This process's number among the processes of its host."""
    current_context().require()
    return current_context().local_rank


def local_size() -> int:
    """The number of processes on this host."""
    current_context().require()
    return current_context().local_size


def mp_rank() -> int:
    """This rank's number in its replica of the model."""
    return _rank("MP_GROUP")


def mp_size() -> int:
    """The number of ranks that hold one replica of the model."""
    return _size("MP_GROUP")


def pp_rank() -> int:
    """This rank's stage."""
    return _rank("PP_GROUP")


def pp_size() -> int:
    """The number of stages."""
    return _size("PP_GROUP")


def dp_rank() -> int:
    """This rank's replica."""
    return _rank("DP_GROUP")


def dp_size() -> int:
    """The number of replicas."""
    return _size("DP_GROUP")


def tp_rank() -> int:
    """This rank's number among those that share tensors; 0."""
    return _rank("TP_GROUP")


def tp_size() -> int:
    """The number of ranks that share tensors; 1."""
    return _size("TP_GROUP")


def rdp_rank() -> int:
    """This rank's number among those that hold the same parameters."""
    return _rank("RDP_GROUP")


def rdp_size() -> int:
    """The number of ranks that hold the same parameters."""
    return _size("RDP_GROUP")


def get_mp_group() -> list[int]:
    """The ranks that hold this rank's replica of the model."""
    return list(current_context().group("MP_GROUP"))


def get_pp_group() -> list[int]:
    """The ranks that hold the stages of this rank's pipeline, in order."""
    return list(current_context().group("PP_GROUP"))


def get_dp_group() -> list[int]:
    """The ranks that hold the same stage in all replicas."""
    return list(current_context().group("DP_GROUP"))


def get_tp_group() -> list[int]:
    """The ranks that share tensors with this one."""
    return list(current_context().group("TP_GROUP"))


def get_rdp_group() -> list[int]:
    """The ranks that hold the same parameters as this one."""
    return list(current_context().group("RDP_GROUP"))


def send(obj: Any, dest_rank: int, rank_type: RankType = RankType.WORLD_RANK) -> None:
    """Sends an object to a rank, which calls `recv_from`.

    Args:
        obj: Any object that can be pickled.
        dest_rank: The receiver.
        rank_type: How `dest_rank` is numbered.

    Raises:
        SMPRuntimeError: If the receiver is this rank, or its connection is lost.
        ValueError: If there is no such rank.
    """
    to = _world_rank(dest_rank, rank_type)
    current_context().objects.send(obj, to)


def recv_from(src_rank: int, rank_type: RankType = RankType.WORLD_RANK) -> Any:
    """Waits for the next object that a rank sends here.

    Args:
        src_rank: The sender.
        rank_type: How `src_rank` is numbered.

    Returns:
        The object.

    Raises:
        SMPRuntimeError: If the sender is this rank, its connection is lost, or nothing arrives within
            SMP_TIMEOUT_SECONDS.
        ValueError: If there is no such rank.
    """
    source = _world_rank(src_rank, rank_type)
    return current_context().objects.receive(source)


def broadcast(obj: Any, group: CommGroup = CommGroup.WORLD) -> None:
    """Sends an object to all other ranks of a group. They call `recv_from` with this rank.

    Args:
        obj: Any object that can be pickled.
        group: The group.

    Raises:
        SMPRuntimeError: If the connection to a receiver is lost.
    """
    for other in current_context().group(group.value):
        if other != current_context().rank:
            current_context().objects.send(obj, other)


def allgather(obj: Any, group: CommGroup = CommGroup.WORLD) -> list[Any]:
    """Exchanges one object between all ranks of a group; each of them calls it.

    Args:
        obj: Any object that can be pickled.
        group: The group.

    Returns:
        Every rank's object, in the order of the group's ranks.

    Raises:
        SMPRuntimeError: If a connection is lost, or a rank does not call it within SMP_TIMEOUT_SECONDS.
    """
    ranks = current_context().group(group.value)
    return current_context().objects.gather(obj, ranks)


def barrier(group: CommGroup = CommGroup.WORLD) -> None:
    """Waits until all ranks of a group have called it.

    Raises SMPRuntimeError if a connection is lost, or a rank does not call it within SMP_TIMEOUT_SECONDS.
    """
    allgather(None, group)


def mp_barrier() -> None:
    """Waits for the ranks of this rank's replica of the model."""
    barrier(CommGroup.MP_GROUP)


def pp_barrier() -> None:
    """Waits for the stages of this rank's pipeline."""
    barrier(CommGroup.PP_GROUP)


def dp_barrier() -> None:
    """Waits for the ranks that hold this rank's stage."""
    barrier(CommGroup.DP_GROUP)


def tp_barrier() -> None:
    """Waits for the ranks that share tensors with this one."""
    barrier(CommGroup.TP_GROUP)


def rdp_barrier() -> None:
    """Waits for the ranks that hold the same parameters."""
    barrier(CommGroup.RDP_GROUP)


def _world_rank(number: int, rank_type: RankType) -> int:
    ranks = current_context().group(rank_type.value)
    if not 0 <= number < len(ranks):
        raise ValueError(
            f"{rank_type.name} {number} does not exist. Allowed: 0 to {len(ranks) - 1}. Fix: name one of these."
        )
    return ranks[number]
