"""Joins and leaves the job; returns this process's rank, the sizes and the communication engine."""

from __future__ import annotations

from smdistributed.core.launch import Launch, read_launch
from smdistributed.core.tensorflow.group import Group, open_group, take_gpu
from smdistributed.dataparallel import _start_requested_profiler
from smdistributed.dataparallel.exceptions import SMDDPError

_joined: tuple[Launch, Group] | None = None
_left = False


def init() -> None:
    """Joins the job, and gives TensorFlow only this local rank's GPU, if there is one.

    The number of the GPU is the local rank modulo the number of GPUs. Its memory grows as needed, unless the script has
    set a limit.

    Call it before TensorFlow computes. The ranks come from mpirun, or from RANK, WORLD_SIZE and LOCAL_RANK. Without a
    launcher this is a job of one rank. Errors of `open_group` pass, such as SMDDPError for a wrong SMDDP_ENGINE.

    Raises:
        SMDDPError: If it was called before, also if `shutdown` followed, or TensorFlow already uses other GPUs. Also if
            SMDDP_TIMELINE is set and its file cannot be written.
        LaunchError: If the environment contradicts itself, or gives no address to meet at.
        StoreError: If rank 0 is not reached.
    """
    global _joined
    if _joined is not None:
        raise SMDDPError("smdistributed.dataparallel.tensorflow.init() was called before. Fix: call it once.")
    launch = read_launch()
    _start_requested_profiler(launch.rank, launch.world_size)
    take_gpu(launch.local_rank)
    _joined = launch, open_group(launch)


def shutdown() -> None:
    """Leaves the job. No collective can run after that, nor another `init`. Raises SMDDPError before `init`.

    On rank 0 it ends the job's store for all ranks.
    """
    global _left
    _group().close()
    _left = True


def is_initialized() -> bool:
    """Whether this process has joined the job, and not left it."""
    return _joined is not None and not _left


def rank() -> int:
    """Returns this process's rank, from 0. Raises SMDDPError before `init`, as the functions below do."""
    return _launch().rank


def size() -> int:
    """Returns the number of ranks of the job."""
    return _launch().world_size


def local_rank() -> int:
    """Returns this process's rank among the ranks of its host, from 0."""
    return _launch().local_rank


def local_size() -> int:
    """Returns the number of ranks of this host. Raises SMDDPError before `init`, and if the launcher does not say."""
    found = _launch().local_world_size
    if found is None:
        raise SMDDPError("The launcher does not say how many ranks this host has. Fix: set LOCAL_WORLD_SIZE.")
    return found


def engine() -> str:
    """Returns the name of the communication engine, with the reason for choosing it."""
    return _group().engine


def require_size() -> int:
    return _launch().world_size


def _launch() -> Launch:
    if _joined is None:
        raise SMDDPError("smdistributed.dataparallel.tensorflow.init() has not been called. Fix: call it first.")
    return _joined[0]


def _group() -> Group:
    """Returns the job's group, also after `shutdown`. Raises SMDDPError before `init`."""
    _launch()
    assert _joined is not None
    return _joined[1]
