"""Reservations of transfers: simulated ranks never wait in a circle, however long their signals take."""

from __future__ import annotations

import random
from collections import defaultdict, deque

import pytest
from tests.repeats import SEED, times

from smdistributed.modelparallel.backend.reservations import Reservations, Signal, Transfer

pytestmark = pytest.mark.soak


class Job:
    """Ranks in one thread. A rank takes nothing while it carries out a transfer, as its thread waits for the peer."""

    def __init__(self, ranks: int) -> None:
        self.inboxes: dict[tuple[int, int], deque[tuple[Signal, Transfer]]] = defaultdict(deque)
        self.ranks = [Reservations(rank, self._signal_of(rank)) for rank in range(ranks)]
        self.ended: list[Transfer] = []

    def _signal_of(self, rank: int):  # type: ignore[no-untyped-def]
        return lambda to, signal, transfer: self.inboxes[rank, to].append((signal, transfer))

    def moves(self, unoffered: list[Transfer]) -> list[tuple[str, object]]:
        """All that can happen next."""
        free = {rank for rank, reservations in enumerate(self.ranks) if reservations.ready is None}
        offers = [("offer", transfer) for transfer in unoffered if transfer.sender in free]
        signals = [("take", pair) for pair, inbox in self.inboxes.items() if inbox and pair[1] in free]
        begun = [reservations.ready for reservations in self.ranks if reservations.ready is not None]
        return [*offers, *signals, *(("end", transfer) for transfer in set(begun) if begun.count(transfer) == 2)]

    def do(self, what: str, about: object) -> None:
        if what == "offer":
            assert isinstance(about, Transfer)
            self.ranks[about.sender].offer(about)
        elif what == "take":
            assert isinstance(about, tuple)
            self.ranks[about[1]].take(*self.inboxes[about].popleft())
        else:
            assert isinstance(about, Transfer)
            self.ended.append(about)
            for rank in (about.sender, about.receiver):
                self.ranks[rank].finish()


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_every_transfer_ends_whatever_comes_first(ranks: int) -> None:
    drawn = random.Random(SEED + ranks)
    for _ in range(times(100, 5000)):
        job = Job(ranks)
        pairs = [drawn.sample(range(ranks), 2) for _ in range(drawn.randrange(1, 12 * ranks))]
        transfers = [Transfer(sender, receiver, number) for number, (sender, receiver) in enumerate(pairs)]
        unoffered = list(transfers)
        while moves := job.moves(unoffered):
            what, about = drawn.choice(moves)
            job.do(what, about)
            if what == "offer":
                assert isinstance(about, Transfer)
                unoffered.remove(about)
        assert sorted(job.ended) == sorted(transfers), "the ranks wait for each other"


def test_a_signal_that_is_not_the_next_one_is_refused() -> None:
    upwards = Transfer(0, 1, 0)
    for rank, signal in ((0, Signal.START), (0, Signal.RESERVED), (1, Signal.OFFER), (1, Signal.START)):
        with pytest.raises(ValueError, match=f"rank {rank} does not expect {signal.name} of Transfer"):
            Reservations(rank, lambda *_: None).take(signal, upwards)
