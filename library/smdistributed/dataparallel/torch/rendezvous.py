"""How the ranks meet: the store they share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch._C._distributed_c10d import FileStore, HashStore, Store
from torch.distributed.rendezvous import rendezvous

from smdistributed.core.launch import LaunchError

if TYPE_CHECKING:
    from smdistributed.core.launch import Address, Launch


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
