"""The output of `smddprun --explain`: this rank, and its communication engine as far as one rank knows it.

Also lists the values of SMDDP_ENGINE (CHOICES), by which `engine_selection` checks it.
"""

from __future__ import annotations

import os
from pathlib import Path

from smdistributed.core import segment
from smdistributed.core.launch import LaunchError, read_launch
from smdistributed.core.native import engine_problem
from smdistributed.core.shm_engine import choose_slot_bytes

CHOICES = ("auto", "shm", "mpi", "gloo", "nccl")
"""The values of SMDDP_ENGINE."""


def explain() -> str:
    """Returns facts about this rank, one in each line. It opens nothing; a wrong setting is shown, not raised."""
    return "\n".join(f"{name + ':':16}{fact}" for name, fact in (_rank(), _engine(), _memory(), _hosts(), _cuda()))


def _rank() -> tuple[str, str]:
    """Returns the name and the fact about this rank; if the launch's variables are wrong, the fact is the error."""
    try:
        launch = read_launch()
    except LaunchError as error:
        return "launch", str(error)
    if not launch.launched:
        return "launch", "no launcher started this process: a job of one rank"
    at = f"{launch.master.host}:{launch.master.port}" if launch.master else str(launch.session_dir or "nowhere")
    where = f"local rank {launch.local_rank}" + (f" of {launch.local_world_size}" if launch.local_world_size else "")
    return "launch", f"rank {launch.rank} of {launch.world_size}, {where}; ranks meet at {at}"


def _engine() -> tuple[str, str]:
    wanted = os.environ.get("SMDDP_ENGINE") or "auto"
    if wanted not in CHOICES:
        return "engine", f"SMDDP_ENGINE={wanted!r} is not a communication engine: use one of {', '.join(CHOICES)}"
    meaning = {
        "auto": "shared memory inside a host if possible, gloo between hosts",
        "shm": "shared memory inside a host, or an error; gloo between hosts",
        "mpi": "shared memory inside a host if possible, MPI between hosts",
        "gloo": "gloo everywhere",
        "nccl": "NCCL for CUDA tensors, or an error; CPU tensors as with auto",
    }
    return "engine", f"SMDDP_ENGINE={wanted}: {meaning[wanted]}"


def _memory() -> tuple[str, str]:
    """Returns the name and the fact about the shared memory that this host's ranks would use, or why they can't."""
    problem = engine_problem()
    if problem:
        return "shared memory", f"none: {problem}"
    size = _local_ranks()
    slot_bytes, length = choose_slot_bytes(size)
    free = segment.free_bytes()
    place = f"{free >> 20} MiB free in /dev/shm" if free >= length else "too little in /dev/shm: in a temporary file"
    return (
        "shared memory",
        f"{length / (1 << 20):.1f} MiB for {size} local ranks, pieces of {slot_bytes >> 10} KiB; {place}",
    )


def _local_ranks() -> int:
    try:
        return read_launch().local_world_size or 1
    except LaunchError:
        return 1


def _hosts() -> tuple[str, str]:
    return "this host", segment.this_process().host


def _cuda() -> tuple[str, str]:
    otherwise = "an error" if os.environ.get("SMDDP_ENGINE") == "nccl" else "copied to the host and reduced there"
    devices, ranks = len(list(Path("/dev").glob("nvidia[0-9]*"))), _local_ranks()
    here = f"this host has {devices} NVIDIA device{'' if devices == 1 else 's'} for {ranks} local rank"
    return "CUDA tensors", (
        f"NCCL if every rank has a device of its own, else {otherwise}; {here}{'' if ranks == 1 else 's'}"
    )
