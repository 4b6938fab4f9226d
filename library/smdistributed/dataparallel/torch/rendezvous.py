"""How the ranks meet: the store they share, and the backend they agree on over it."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch
import torch.distributed
from torch._C._distributed_c10d import FileStore, HashStore, Store
from torch.distributed.rendezvous import rendezvous

from smdistributed.core.launch import LaunchError

if TYPE_CHECKING:
    from smdistributed.core.launch import Address, Launch

CPU_BACKEND = "gloo"
CUDA_BACKEND = "cpu:gloo,cuda:nccl"


def open_store(launch: Launch) -> Store:
    """The job's key-value store: in memory for one rank, else at the master's address, else in the session directory.

    Raises LaunchError when several ranks have neither an address nor a directory in common.
    """
    if launch.world_size == 1:
        return HashStore()
    if launch.master is not None:
        return _store_at(launch.master, launch)
    if launch.session_dir is not None:
        return FileStore(str(launch.session_dir / "smdistributed-store"), launch.world_size)
    raise LaunchError(
        f"This process is rank {launch.rank} of {launch.world_size}, but nothing says where the ranks meet: "
        "set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a port that is free there."
    )


def _store_at(master: Address, launch: Launch) -> Store:
    """torch's own rendezvous: it knows when torchrun's agent, and not rank 0, serves the store."""
    host = f"[{master.host}]" if ":" in master.host else master.host
    store: Store
    store, _, _ = next(rendezvous(f"tcp://{host}:{master.port}", launch.rank, launch.world_size))
    return store


def agree_on_backend(store: Store, launch: Launch, has_device: bool) -> str:
    """NCCL beside gloo when every rank has a CUDA device of its own (`has_device`), else gloo; the same on all."""
    store.add("smdistributed/with_device", int(has_device))
    if store.add("smdistributed/arrived", 1) == launch.world_size:  # the last rank has seen all
        with_device = store.add("smdistributed/with_device", 0)
        store.set("smdistributed/backend", CUDA_BACKEND if with_device == launch.world_size else CPU_BACKEND)
    return store.get("smdistributed/backend").decode()


def take_device(launch: Launch) -> bool:
    """Make the CUDA device numbered like the local rank the current one; False when this rank has none to itself."""
    devices = torch.cuda.device_count()
    if launch.local_rank < devices:
        torch.cuda.set_device(launch.local_rank)
        return torch.distributed.is_nccl_available()
    if devices:
        warnings.warn(
            f"Local rank {launch.local_rank} has no CUDA device of its own ({devices} on this host): "
            "the job communicates over gloo.",
            stacklevel=3,
        )
    return False
