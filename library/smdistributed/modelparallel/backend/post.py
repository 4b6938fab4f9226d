"""Objects between ranks, outside steps: send, receive, gather (AWS API). All block, for no longer than the limit.

How an object travels is the front's: `send(to, box, obj)` sends it to the letter box of that name on that rank, whose
front gives what has come to `deliver`; `read` makes an object of it, on the thread that asks for it.
"""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from smdistributed.modelparallel.backend.exceptions import SMPRuntimeError
from smdistributed.modelparallel.backend.limits import LONGER

_GONE = object()


class Post:
    """What this rank's scripts send and receive. A letter box for each sender, and another for what groups exchange.

    seconds: how long to wait for an object.
    """

    def __init__(
        self, rank: int, send: Callable[[int, str, object], None], read: Callable[[Any], Any], seconds: float
    ) -> None:
        self._rank, self._send, self._read, self._seconds = rank, send, read, seconds
        self._lock = threading.Lock()
        self._boxes: dict[tuple[int, str], queue.SimpleQueue[Any]] = defaultdict(queue.SimpleQueue)
        self._gone: set[int] = set()

    def send(self, obj: object, to: int, box: str = "") -> None:
        """Send any object that can be pickled. Raises SMPRuntimeError when that is this rank, or one that is gone."""
        if to == self._rank:
            raise SMPRuntimeError(f"Rank {to} sends to itself: name another rank.")
        try:
            self._send(to, box, obj)
        except OSError as error:
            raise SMPRuntimeError(f"Rank {to} is gone: its own error says why ({error}).") from error

    def receive(self, source: int, box: str = "") -> Any:
        """The next object from that rank. Raises SMPRuntimeError when it is gone, or sends none in time."""
        if source == self._rank:
            raise SMPRuntimeError(f"Rank {source} waits for itself: name another rank.")
        with self._lock:
            inbox = self._boxes[source, box]
            if source in self._gone:
                inbox.put(_GONE)
        try:
            letter = inbox.get(timeout=self._seconds)
        except queue.Empty:
            raise SMPRuntimeError(
                f"Rank {source} has sent nothing to rank {self._rank}, which waits for an object of it, within "
                f"{self._seconds:g} s. {LONGER}"
            ) from None
        if letter is _GONE:
            raise SMPRuntimeError(f"Rank {source} is gone: its own error says why.")
        return self._read(letter)

    def gather(self, obj: object, ranks: Sequence[int]) -> list[Any]:
        """Every rank's object, in the order of `ranks`, which all call this."""
        for rank in ranks:
            if rank != self._rank:
                self.send(obj, rank, "gather")
        return [obj if rank == self._rank else self.receive(rank, "gather") for rank in ranks]

    def deliver(self, source: int, box: str, letter: Any) -> None:
        """Something has come for `receive`, which reads it."""
        with self._lock:
            self._boxes[source, box].put(letter)

    def lost(self, source: int) -> None:
        """That rank sends nothing any more: whoever waits for it hears so, after what has come."""
        with self._lock:
            self._gone.add(source)
            for (rank, _), inbox in self._boxes.items():
                if rank == source:
                    inbox.put(_GONE)
