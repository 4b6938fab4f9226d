"""What `smddprun --explain` prints: which rank this is, and which engine its job chooses, as far as one rank knows."""

from __future__ import annotations

import os
from pathlib import Path

from smdistributed.core import segment
from smdistributed.core.launch import LaunchError, read_launch
from smdistributed.core.shared_memory import choose_slot_bytes, without_engine

CHOICES = ("auto", "shm", "mpi", "gloo", "nccl")
"""The values of SMDDP_ENGINE."""


def explain() -> str:
    """Return a line a fact."""
    return "\n".join(f"{name + ':':16}{fact}" for name, fact in (_rank(), _engine(), _memory(), _hosts(), _cuda()))


def _rank() -> tuple[str, str]:
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
        return "engine", f"SMDDP_ENGINE={wanted!r} is not an engine: use one of {', '.join(CHOICES)}"
    meaning = {
        "auto": "shared memory inside a host where it is possible, gloo between hosts",
        "shm": "shared memory inside a host, or an error; gloo between hosts",
        "mpi": "shared memory inside a host where it is possible, MPI between hosts",
        "gloo": "gloo everywhere",
        "nccl": "NCCL for tensors on CUDA devices, or an error; those on the CPU as with auto",
    }
    return "engine", f"SMDDP_ENGINE={wanted}: {meaning[wanted]}"


def _memory() -> tuple[str, str]:
    problem = without_engine()
    if problem:
        return "shared memory", f"none: {problem}"
    size = _local_ranks()
    slot_bytes, length = choose_slot_bytes(size)
    room = segment.room()
    place = f"{room >> 20} MiB free in /dev/shm" if room >= length else "no room in /dev/shm: in a temporary file"
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
    here = f"this host shows {devices} NVIDIA device{'' if devices == 1 else 's'} to {ranks} local rank"
    return "CUDA tensors", (
        f"NCCL where every rank has a device of its own, else {otherwise}; {here}{'' if ranks == 1 else 's'}"
    )
