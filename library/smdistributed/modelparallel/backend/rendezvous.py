"""How the ranks of a job connect: they agree on a secret key, and tell each other the addresses at which they listen.

If the launch gives the job a secret, the key is derived from it. Otherwise, ranks of one host share a random key
through a file that only their user can read. Ranks of several hosts without a secret share it through the store.
"""

from __future__ import annotations

import os
import secrets
import stat
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack

from smdistributed.core.launch import LaunchError
from smdistributed.core.secret import VARIABLES, job_key
from smdistributed.core.sockets import is_loopback, own_address
from smdistributed.core.store import Store
from smdistributed.modelparallel.backend.transport import Access, Transport

_KEY_BYTES = 32
_FROM_SECRET, _IN_FILE, _IN_STORE = "secret", "file", "plain"
_LOOPBACK = "127.0.0.1"
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def connect_ranks(
    store: Store, rank: int, size: int, master: str, is_on_one_host: bool, open_transport: Callable[[Access], Transport]
) -> Transport:
    """Opens this rank's transport and sets the addresses of all other ranks. Every rank calls this, and waits for all.

    `store` has a prefix that only this function uses. `master` is the host name or address of rank 0, as the others
    reach it. If all ranks are on one host, they listen on the loopback address only. Messages may arrive as soon as
    `open_transport` has returned. Raises LaunchError if ranks have been given different secrets, or cannot share a key.
    """
    with ExitStack() as undo:
        address = _LOOPBACK if is_on_one_host else _address_for_peers(store, rank, size, master)
        key = _agree_on_key(store, rank, is_loopback(address), undo)
        transport = open_transport(Access(key, address))
        store.set(str(rank), f"{address} {transport.port}")
        others = [other for other in range(size) if other != rank]
        transport.set_peers({other: _parse_address(store.get(str(other)).decode()) for other in others})
    return transport


def _agree_on_key(store: Store, rank: int, is_on_one_host: bool, undo: ExitStack) -> bytes:
    """Returns the job's key: from its secret, a file or the store. Raises LaunchError if ranks disagree."""
    own = job_key("transport")
    if rank == 0 and own:
        store.set("key", f"{_FROM_SECRET} ")
    elif rank == 0:
        store.set("key", f"{_IN_FILE} {_write_key(undo)}" if is_on_one_host else f"{_IN_STORE} {_make_public_key()}")
    source, _, value = store.get("key").decode().partition(" ")
    if (source == _FROM_SECRET) != (own is not None):
        raise LaunchError(
            f"Rank {rank} has {'a' if own else 'no'} job secret, and rank 0 has {'none' if own else 'one'}. "
            f"Fix: give all ranks the same {VARIABLES[0]}, or none; with mpirun add -x {VARIABLES[0]}."
        )
    if own is None and (source == _IN_FILE) != is_on_one_host:
        raise LaunchError(
            f"Rank {rank} finds a key in the store that this job's ranks did not write: another job or another person "
            f"uses the store. Fix: give the job a MASTER_PORT of its own, or give all ranks the same {VARIABLES[0]}."
        )
    return own or (_read_key(value, rank) if source == _IN_FILE else bytes.fromhex(value))


def _make_public_key() -> str:
    """Returns a new key, as text, that others can read in the store; prints a warning that it is not secret."""
    print(
        "smp: this job runs on several hosts without a secret. Anybody who reaches MASTER_PORT on the network can read "
        f"the key of its transport, take part in it and run code in it. Fix: set {VARIABLES[0]} to the same random "
        "word of 32 characters on all ranks, or isolate the job's network.",
        file=sys.stderr,
        flush=True,
    )
    return secrets.token_hex(_KEY_BYTES)


def _write_key(undo: ExitStack) -> str:
    """Writes a new key to a file that only this user can read, and returns its path. `undo` removes the file."""
    descriptor, path = tempfile.mkstemp(prefix="smp-key-")
    undo.callback(os.unlink, path)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secrets.token_bytes(_KEY_BYTES))
    return path


def _read_key(path: str, rank: int) -> bytes:
    """Raises LaunchError if another user owns or may read the file, or it has no key: anybody may write to a store."""
    problem = "it belongs to another user, others may read it, or it is not a key"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            about = os.fstat(descriptor)
            is_own = about.st_uid == os.geteuid() and stat.S_ISREG(about.st_mode) and not about.st_mode & _OTHERS
            key = file.read(_KEY_BYTES + 1) if is_own else b""
    except OSError as error:
        problem, key = str(error), b""
    if len(key) != _KEY_BYTES:
        raise LaunchError(
            f"Rank {rank} cannot read the key that rank 0 wrote to {path}: {problem}. Ranks of one host must share a "
            f"user and a directory for temporary files. Fix: make them, or give all ranks the same {VARIABLES[0]}."
        )
    return key


def _address_for_peers(store: Store, rank: int, size: int, master: str) -> str:
    """Returns the address at which the other hosts reach this one, and writes this rank's own to the store."""
    own = own_address(master)
    store.set(f"address {rank}", own)
    if not is_loopback(own):
        return own
    # On the master's host its own name may resolve to the loopback address. The route to any other host is right.
    others = (store.get(f"address {other}").decode() for other in range(size))
    return next((own_address(other) for other in others if not is_loopback(other)), own)


def _parse_address(text: str) -> tuple[str, int]:
    host, port = text.split()
    return host, int(port)
