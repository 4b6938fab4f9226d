"""How the ranks' mail comes together: they get a key that only they have, and tell each other where they listen.

The key is derived from the job's secret, if the launch gives one. Ranks of one host share a random one through a file
that only their user can read. Without a secret, those of several hosts can only share it through the store.
"""

from __future__ import annotations

import os
import secrets
import stat
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from typing import Protocol

from smdistributed.core.launch import LaunchError
from smdistributed.core.mail import Access, Mail
from smdistributed.core.secret import VARIABLES, job_key
from smdistributed.core.sockets import is_loopback, own_address

_KEY_BYTES = 32
_SECRET, _FILE, _PLAIN = "secret", "file", "plain"
_LOOPBACK = "127.0.0.1"
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class WordStore(Protocol):
    """What a meeting needs of a store, torch's or the core's: `get` waits for the word."""

    def set(self, key: str, value: str, /) -> object: ...
    def get(self, key: str, /) -> bytes: ...


def meet(
    store: WordStore, rank: int, size: int, master: str, is_on_one_host: bool, open_mail: Callable[[Access], Mail]
) -> Mail:
    """Open this rank's mail and introduce it to all others; every rank calls it.

    store: its keys are those of nobody else: give one with a prefix.
    master: the host of rank 0, as the others reach it.
    is_on_one_host: all ranks are. They listen where only this host reaches them.
    open_mail: makes the mail. What others send may come as soon as it has returned.

    Raises LaunchError if ranks have been given different secrets, or cannot share a key.
    """
    with ExitStack() as undo:
        address = _LOOPBACK if is_on_one_host else _address_for_peers(store, rank, size, master)
        key = _agreed_key(store, rank, is_loopback(address), undo)
        mail = open_mail(Access(key, address))
        store.set(str(rank), f"{address} {mail.port}")
        others = [other for other in range(size) if other != rank]
        mail.meet({other: _place(store.get(str(other)).decode()) for other in others})
    return mail


def _agreed_key(store: WordStore, rank: int, is_on_one_host: bool, undo: ExitStack) -> bytes:
    """The key of this job. undo: what is to be done when all ranks have it."""
    own = job_key("transport")
    if rank == 0:
        way, word = (_SECRET, "") if own else (_FILE, _write_key(undo)) if is_on_one_host else (_PLAIN, _plain_key())
        store.set("key", f"{way} {word}")
    way, _, word = store.get("key").decode().partition(" ")
    if (way == _SECRET) != (own is not None):
        raise LaunchError(
            f"Rank {rank} has {'a' if own else 'no'} secret of the job, and rank 0 has {'none' if own else 'one'}. "
            f"Fix: give all ranks the same {VARIABLES[0]}, or none; with mpirun add -x {VARIABLES[0]}."
        )
    if own is None and (way == _FILE) != is_on_one_host:
        raise LaunchError(
            f"Rank {rank} finds another way to the job's key in the store than its ranks take: another job, or another "
            f"person, writes there. Fix: give the job a MASTER_PORT of its own, or all ranks the same {VARIABLES[0]}."
        )
    return own or (_read_key(word, rank) if way == _FILE else bytes.fromhex(word))


def _plain_key() -> str:
    """A key for the store, where others can read it: says so."""
    print(
        "smp: this job runs on several hosts without a secret. Whoever reaches MASTER_PORT on the network can read the "
        f"key of its transport, take part in it and run code in it. Fix: set {VARIABLES[0]} to the same random word of "
        "32 characters on all ranks, or keep the job's network to itself.",
        file=sys.stderr,
        flush=True,
    )
    return secrets.token_hex(_KEY_BYTES)


def _write_key(undo: ExitStack) -> str:
    """A file with a new key, for this user alone; removed when all have read it."""
    descriptor, path = tempfile.mkstemp(prefix="smp-key-")
    undo.callback(os.unlink, path)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secrets.token_bytes(_KEY_BYTES))
    return path


def _read_key(path: str, rank: int) -> bytes:
    """The key in a file of this user, who alone may have read or written it: anybody may write a path into a store."""
    problem = "it is another user's, others may read it, or it is no key"
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
            f"Rank {rank} cannot read the key that rank 0 has left in {path}: {problem}. Ranks of one host share a "
            f"user and a directory for temporary files. Fix: let them, or give all ranks the same {VARIABLES[0]}."
        )
    return key


def _address_for_peers(store: WordStore, rank: int, size: int, master: str) -> str:
    """The address of this host towards the others of the job."""
    own = own_address(master)
    store.set(f"address {rank}", own)
    if not is_loopback(own):
        return own
    # The master's host may know its name as its own loopback: the way to any other host tells more.
    words = (store.get(f"address {other}").decode() for other in range(size))
    return next((own_address(word) for word in words if not is_loopback(word)), own)


def _place(text: str) -> tuple[str, int]:
    host, port = text.split()
    return host, int(port)
