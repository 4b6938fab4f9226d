"""This process's place in the job: `init` joins it, and the functions below say what it is."""

from __future__ import annotations

from smdistributed.core.launch import Launch, read_launch
from smdistributed.core.tensorflow.devices import take_gpu
from smdistributed.core.tensorflow.group import Group, open_group
from smdistributed.dataparallel.exceptions import SMDDPError

_joined: tuple[Launch, Group] | None = None
_left = False


def init() -> None:
    """Join the job, and take the GPU of this local rank, if there is one. Call it first, before TensorFlow computes.

    The ranks are those of mpirun or of RANK, WORLD_SIZE and LOCAL_RANK; without a launcher this is a job of one.

    Raises SMDDPError when it was called before and when TensorFlow has already begun to use other GPUs; LaunchError
    when the environment contradicts itself.
    """
    global _joined
    if _joined is not None:
        raise SMDDPError("smdistributed.dataparallel.tensorflow.init() was called before: call it once.")
    launch = read_launch()
    take_gpu(launch.local_rank)
    _joined = launch, open_group(launch)


def shutdown() -> None:
    """Leave the job: no collective can run after that."""
    global _left
    _group().close()
    _left = True


def is_initialized() -> bool:
    """Whether `init` was called, and `shutdown` was not."""
    return _joined is not None and not _left


def rank() -> int:
    """This process's rank, from 0."""
    return _launch().rank


def size() -> int:
    """How many ranks the job has."""
    return _launch().world_size


def local_rank() -> int:
    """This process's rank among those of its host."""
    return _launch().local_rank


def local_size() -> int:
    """How many ranks this host has. Raises SMDDPError where the launcher does not say."""
    found = _launch().local_world_size
    if found is None:
        raise SMDDPError("The launcher does not say how many ranks this host has: set LOCAL_WORLD_SIZE.")
    return found


def engine() -> str:
    """The engine of the job, and why it is that one."""
    return _group().engine


def require() -> int:
    """The number of ranks. Raises SMDDPError before `init`."""
    return _launch().world_size


def _launch() -> Launch:
    if _joined is None:
        raise SMDDPError("smdistributed.dataparallel.tensorflow.init() has not been called: call it first.")
    return _joined[0]


def _group() -> Group:
    _launch()
    assert _joined is not None
    return _joined[1]
