"""Python objects between ranks, outside steps: send, receive, gather (AWS API). All calls block, up to a time limit.

The front supplies two functions: `send(to, channel, obj)` puts an object on the wire, and `read` decodes a message.
When a message arrives, the front passes it to `deliver`. `read` runs on the thread that calls `receive`.
"""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from smdistributed.modelparallel.backend.config import CONNECTION_LOST, TIMEOUT_FIX
from smdistributed.modelparallel.backend.exceptions import SMPRuntimeError

_LOST = object()


class ObjectExchange:
    """Sends and receives Python objects. There is one inbox for each sender and channel.

    `send` raises OSError if the rank is lost. `read` decodes a message given to `deliver`. `receive` waits `seconds`.
    """

    def __init__(
        self, rank: int, send: Callable[[int, str, object], None], read: Callable[[Any], Any], seconds: float
    ) -> None:
        self._rank, self._send, self._read, self._seconds = rank, send, read, seconds
        self._lock = threading.Lock()
        self._inboxes: dict[tuple[int, str], queue.SimpleQueue[Any]] = defaultdict(queue.SimpleQueue)
        self._lost: set[int] = set()

    def send(self, obj: object, to: int, channel: str = "") -> None:
        """Raises SMPRuntimeError if `to` is this rank, or is lost. The receiver must name the same channel."""
        if to == self._rank:
            raise SMPRuntimeError(f"Rank {to} sends to itself. Fix: name another rank.")
        try:
            self._send(to, channel, obj)
        except OSError as error:
            raise _connection_lost(to, f" ({error})") from error

    def receive(self, source: int, channel: str = "") -> Any:
        """Waits for the next object of a channel, in the order of sending.

        Raises SMPRuntimeError if `source` is this rank, its connection is lost, or nothing arrives within the limit.
        """
        if source == self._rank:
            raise SMPRuntimeError(f"Rank {source} waits for itself. Fix: name another rank.")
        with self._lock:
            inbox = self._inboxes[source, channel]
            if source in self._lost:
                inbox.put(_LOST)
        try:
            message = inbox.get(timeout=self._seconds)
        except queue.Empty:
            raise SMPRuntimeError(
                f"Rank {self._rank} has waited {self._seconds:g} s for an object from rank {source}, which sent none. "
                f"{TIMEOUT_FIX}"
            ) from None
        if message is _LOST:
            raise _connection_lost(source)
        return self._read(message)

    def gather(self, obj: object, ranks: Sequence[int]) -> list[Any]:
        """Exchanges an object between `ranks`, which all call this. Returns their objects in this order."""
        for rank in ranks:
            if rank != self._rank:
                self.send(obj, rank, "gather")
        return [obj if rank == self._rank else self.receive(rank, "gather") for rank in ranks]

    def gather_to_first(self, obj: object, ranks: Sequence[int], channel: str) -> list[Any]:
        """Sends each rank's object to the first of `ranks`, which gets them in this order. Others get an empty list."""
        if self._rank != ranks[0]:
            self.send(obj, ranks[0], channel)
            return []
        return [obj, *(self.receive(rank, channel) for rank in ranks[1:])]

    def deliver(self, source: int, channel: str, message: Any) -> None:
        with self._lock:
            self._inboxes[source, channel].put(message)

    def lost(self, source: int) -> None:
        """Marks a rank as lost: after the objects that have arrived from it, `receive` raises."""
        with self._lock:
            self._lost.add(source)
            for (rank, _), inbox in self._inboxes.items():
                if rank == source:
                    inbox.put(_LOST)


def _connection_lost(rank: int, detail: str = "") -> SMPRuntimeError:
    return SMPRuntimeError(f"Rank {rank}: {CONNECTION_LOST}{detail}")
