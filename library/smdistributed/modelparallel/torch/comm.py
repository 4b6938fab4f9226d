"""Objects between ranks, outside steps: send, receive, broadcast, gather, barrier (AWS API). All block."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from smdistributed.core.mail import Mail
from smdistributed.modelparallel.backend.exceptions import SMPRuntimeError
from smdistributed.modelparallel.torch.messages import Kind, Message, send
from smdistributed.modelparallel.torch.packing import pack, unpack


class Post:
    """What this rank's scripts send and receive. A letter box for each sender, and another for what groups exchange."""

    def __init__(self, mail: Mail, rank: int) -> None:
        self._mail, self._rank = mail, rank
        self._lock = threading.Lock()
        self._boxes: dict[tuple[int, str], queue.SimpleQueue[Message | None]] = defaultdict(queue.SimpleQueue)
        self._gone: set[int] = set()

    def send(self, obj: object, to: int, box: str = "") -> None:
        """Send any object that can be pickled; its tensors arrive on the kind of device that they were on."""
        if to == self._rank:
            raise SMPRuntimeError(f"Rank {to} sends to itself: name another rank.")
        body, tensors = pack(obj)
        send(self._mail, to, Kind.OBJECT, 0, call=box, about=body, tensors=tensors)

    def receive(self, source: int, box: str = "") -> Any:
        """The next object from that rank. Raises SMPRuntimeError when it is gone."""
        if source == self._rank:
            raise SMPRuntimeError(f"Rank {source} waits for itself: name another rank.")
        with self._lock:
            inbox = self._boxes[source, box]
            if source in self._gone:
                inbox.put(None)
        message = inbox.get()
        if message is None:
            raise SMPRuntimeError(f"Rank {source} is gone: its own error says why.")
        return unpack(message.about, [tensor for tensor in message.all_here() if tensor is not None])

    def gather(self, obj: object, ranks: Sequence[int]) -> list[Any]:
        """Every rank's object, in the order of `ranks`, which all call this."""
        for rank in ranks:
            if rank != self._rank:
                self.send(obj, rank, "gather")
        return [obj if rank == self._rank else self.receive(rank, "gather") for rank in ranks]

    def deliver(self, message: Message) -> None:
        with self._lock:
            self._boxes[message.source, message.call].put(message)

    def lost(self, source: int) -> None:
        with self._lock:
            self._gone.add(source)
            for (rank, _), inbox in self._boxes.items():
                if rank == source:
                    inbox.put(None)
