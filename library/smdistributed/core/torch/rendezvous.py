"""Opens the torch store that the ranks of a job share, and further connections to it for monitors."""

from __future__ import annotations

from datetime import timedelta
from functools import cache

from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from smdistributed.core.launch import Address, Launch, no_master_error

_CONNECT = timedelta(seconds=30)


def open_store(launch: Launch) -> Store:
    """Opens the job's store: in memory, at the master's address, or in the session directory.

    Raises LaunchError if several ranks have neither an address nor a directory in common.
    """
    if launch.world_size == 1:
        return HashStore()
    if launch.master is not None:
        return _store_at(launch.master, launch)
    if launch.session_dir is not None:
        return FileStore(str(launch.session_dir / "smdistributed-store"), launch.world_size)
    raise no_master_error(launch)


def _store_at(master: Address, launch: Launch) -> Store:
    """Opens the store by torch's own rendezvous: it knows when torchrun's agent, and not rank 0, serves it."""
    host = f"[{master.host}]" if ":" in master.host else master.host
    store: Store
    store, _, _ = next(rendezvous(f"tcp://{host}:{master.port}", launch.rank, launch.world_size))
    return store


def connect_again(store: Store) -> Store:
    """Opens another connection to a TCPStore, shared by this process's monitors; other stores are returned.

    torch allows one call at a time in a connection, however long it waits for a value.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return _connection(store.host, store.port) if isinstance(store, TCPStore) else store


@cache
def _connection(host: str, port: int) -> Store:
    return TCPStore(host, port, is_master=False, timeout=_CONNECT, wait_for_workers=False)
