"""The stages of this rank's pipeline: how errors name them, and how this rank sends them messages."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from smdistributed.modelparallel.backend.config import CONNECTION_LOST
from smdistributed.modelparallel.backend.exceptions import SMPRuntimeError
from smdistributed.modelparallel.backend.transport import Transport
from smdistributed.modelparallel.torch.pipeline.messages import Kind, send


class Peers:
    """The stages of a pipeline, as one of them sees the others.

    Args:
        transport: Carries the messages.
        ranks: The ranks of the job that hold the stages, in order.
        rank: This rank.
    """

    def __init__(self, transport: Transport, ranks: Sequence[int], rank: int) -> None:
        self._transport, self.ranks = transport, tuple(ranks)
        self.index = self.ranks.index(rank)
        """This rank's stage."""
        self.lost: set[int] = set()
        """The ranks with a connection that has ended."""

    def describe(self, rank: int) -> str:
        """Names a rank for people, as "Stage 1 (rank 3)"."""
        return f"Stage {self.ranks.index(rank)} (rank {rank})" if rank in self.ranks else f"Rank {rank}"

    def lost_error(self, rank: int) -> SMPRuntimeError:
        """The error to raise because a rank's connection has ended."""
        return SMPRuntimeError(f"{self.describe(rank)}: {CONNECTION_LOST}")

    def send(self, to: int, *args: Any, **kwargs: Any) -> None:
        """Sends a message to a rank: see `messages.send`. Raises OSError if its connection is lost."""
        send(self._transport, to, *args, **kwargs)

    def notify_all(self, kind: Kind, about: object = None) -> list[threading.Thread]:
        """Sends a message to every other stage and does not wait. A stage that is lost is left out.

        Each has a thread of its own: a stage with a full socket must not delay the others.

        Args:
            kind: FAILED or WORKING, which belong to no step.
            about: The content of the message.

        Returns:
            The threads that send, started.
        """
        others = [rank for rank in self.ranks if rank != self.ranks[self.index] and rank not in self.lost]
        threads = [threading.Thread(target=self._notify, args=(rank, kind, about), daemon=True) for rank in others]
        for thread in threads:
            thread.start()
        return threads

    def _notify(self, rank: int, kind: Kind, about: object) -> None:
        """Thread of `notify_all`: sends the message to one stage. Errors are ignored: the stage is lost."""
        with suppress(OSError):  # lost as well
            self.send(rank, kind, -1, about=about)
