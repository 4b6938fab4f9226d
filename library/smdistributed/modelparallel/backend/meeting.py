"""How the ranks' mail comes together: through a store they agree on a secret, and tell each other where they listen."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Protocol

from smdistributed.core.mail import Mail, own_address

_SECRET_BYTES = 16


class WordStore(Protocol):
    """What a meeting needs of a store, torch's or the core's: `get` waits for the word."""

    def set(self, key: str, value: str, /) -> object: ...
    def get(self, key: str, /) -> bytes: ...


def meet(store: WordStore, rank: int, size: int, master: str, open_mail: Callable[[bytes], Mail]) -> Mail:
    """Open this rank's mail and introduce it to all others; every rank calls it.

    store: its keys are those of nobody else: give one with a prefix.
    master: the host of rank 0, as the others reach it.
    open_mail: makes the mail with this secret. What others send may come as soon as it has returned.
    """
    if rank == 0:
        store.set("secret", secrets.token_hex(_SECRET_BYTES // 2))
    mail = open_mail(bytes(store.get("secret")))
    store.set(str(rank), f"{_own_address(master)} {mail.port}")
    others = [other for other in range(size) if other != rank]
    mail.meet({other: _address(store.get(str(other)).decode(), master) for other in others})
    return mail


def _own_address(master: str) -> str:
    """Where others find this host; `-`: where they find the master, which this host knows as itself."""
    address = own_address(master)
    return "-" if address.startswith("127.") else address


def _address(text: str, master: str) -> tuple[str, int]:
    host, port = text.split()
    return (master if host == "-" else host), int(port)
