"""Reservations of ranks for transfers between devices: one at a time, and both ranks before either begins.

A transfer needs both ranks at once. While one waits for the other, its device may be blocked. So each rank can be
reserved for one transfer at a time. Every transfer first reserves the rank with the lower number, then the other. A
reserved rank only waits for a higher one, so that ranks never wait in a circle. There are three signals:

- OFFER: the higher rank, which sends, has tensors for the lower one. A lower rank that sends needs no offer.
- RESERVED: the lower rank is reserved for this transfer.
- START: so is the higher one, which begins. The lower one begins when it gets this.

Nothing here waits, sends or computes: see `modelparallel.torch.transfers`.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from typing import NamedTuple


class Signal(enum.IntEnum):
    """Signals between the two ranks of a transfer."""

    OFFER = 0
    RESERVED = 1
    START = 2


class Transfer(NamedTuple):
    """Tensors that one rank sends to another. number: counted by the sender."""

    sender: int
    receiver: int
    number: int

    def peer_of(self, rank: int) -> int:
        """The other one of the two ranks."""
        return self.receiver if rank == self.sender else self.sender


class Reservations:
    """The reservations of one rank.

    Args:
        rank: This rank.
        signal: Sends a signal about a transfer to a rank, without waiting for it.
    """

    def __init__(self, rank: int, signal: Callable[[int, Signal, Transfer], None]) -> None:
        self._rank, self._signal = rank, signal
        self._waiting: deque[Transfer] = deque()
        self._urgent: deque[Transfer] = deque()
        self._current: Transfer | None = None
        self.ready: Transfer | None = None
        """A transfer that both ranks are reserved for: carry it out, then call `finish`."""

    def offer(self, transfer: Transfer) -> None:
        """Announces a transfer that this rank sends: reserves itself if it is the lower rank, else signals an OFFER."""
        if transfer.sender < transfer.receiver:
            self._waiting.append(transfer)
            self._reserve()
        else:
            self._signal(transfer.receiver, Signal.OFFER, transfer)

    def take(self, signal: Signal, transfer: Transfer) -> None:
        """Takes a signal of the other rank, which may begin or reserve a transfer.

        Raises ValueError if it is not the next one of its transfer.
        """
        is_lower = self._rank < transfer.peer_of(self._rank)
        if signal is Signal.OFFER and is_lower:
            self._waiting.append(transfer)
        elif signal is Signal.RESERVED and not is_lower:
            self._urgent.append(transfer)
        elif signal is Signal.START and is_lower and transfer == self._current and self.ready is None:
            self.ready = transfer
        else:
            raise ValueError(f"rank {self._rank} does not expect {signal.name} of {transfer}")
        self._reserve()

    def finish(self) -> None:
        """Ends the transfer that was ready, and reserves this rank for the next one."""
        self._current = self.ready = None
        self._reserve()

    def _reserve(self) -> None:
        """Reserves this rank, if free, for the next transfer, and signals the peer; first those that hold a rank."""
        waiting = self._urgent or self._waiting
        if self._current is not None or not waiting:
            return
        transfer = self._current = waiting.popleft()
        peer = transfer.peer_of(self._rank)
        if self._rank < peer:
            self._signal(peer, Signal.RESERVED, transfer)
        else:
            self._signal(peer, Signal.START, transfer)
            self.ready = transfer
