"""How the ranks meet: the store they share."""

from __future__ import annotations

from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from smdistributed.core.launch import nowhere_to_meet

if TYPE_CHECKING:
    from smdistributed.core.launch import Address, Launch

_CONNECT = timedelta(seconds=30)


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
    raise nowhere_to_meet(launch)


def _store_at(master: Address, launch: Launch) -> Store:
    """torch's own rendezvous: it knows when torchrun's agent, and not rank 0, serves the store."""
    host = f"[{master.host}]" if ":" in master.host else master.host
    store: Store
    store, _, _ = next(rendezvous(f"tcp://{host}:{master.port}", launch.rank, launch.world_size))
    return store


def beside(store: Store) -> Store:
    """The store under all prefixes, by a connection that nobody else of this process waits on.

    torch lets one call use a connection at a time, however long it waits for a word.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return _connection(store.host, store.port) if isinstance(store, TCPStore) else store


@cache
def _connection(host: str, port: int) -> Store:
    return TCPStore(host, port, is_master=False, timeout=_CONNECT, wait_for_workers=False)
