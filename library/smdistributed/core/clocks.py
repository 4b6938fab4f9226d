"""How the clocks of a group's hosts differ, for the timeline: told through the store where the ranks have met.

When a recording has begun, a rank of each host asks rank 0 for the time, again and again; the answer that came soonest
tells the difference best, to half of the time that it took. The other ranks of the host take it over.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from smdistributed.core import timeline
from smdistributed.core.board import StoreLog

_ROUNDS = 10
_ROUND_SECONDS = 0.5


class Clocks:
    """Compares this host's clock with rank 0's, for each recording once. hosts: of all ranks.

    look: how often, in seconds, ranks look at the board when nothing is to be done.
    """

    def __init__(self, board: StoreLog, rank: int, hosts: Sequence[str], look: float) -> None:
        self._log_store, self._rank, self._look = board, rank, look
        self._is_first = hosts[rank] == hosts[0]  # on rank 0's host
        self._host = hosts.index(hosts[rank])
        self._recording: timeline.Recorder | None = None
        self._recordings = 0
        self._known = True

    def compare(self) -> None:
        """Look whether a recording has begun of which the difference is not known yet. To be called now and then."""
        running = timeline.recorder
        if running is not self._recording:
            self._recording = running
            self._recordings += running is not None
            self._known = running is None or self._is_first
        if not self._known:
            self._find(f"clock-{self._recordings}-{self._host}")

    def _find(self, name: str) -> None:
        if not self._log_store.read(f"{name}-asked") and self._log_store.append(f"{name}-asked", None) == 1:
            offset = self._measure(name)
            if offset is not None:
                self._log_store.append(name, offset)
        for offset in self._log_store.read(name)[:1]:
            timeline.set_clock_offset(offset)
            self._known = True

    def _measure(self, name: str) -> int | None:
        """How far rank 0's clock is ahead, in microseconds; None: rank 0 does not answer."""
        self._log_store.append("words", {"kind": "clock", "rank": self._rank, "name": name})
        if not self._await(f"{name}-ready", 2 * self._look + _ROUND_SECONDS):
            return None
        rounds = []
        for number in range(_ROUNDS):
            asked = timeline.wall()
            self._log_store.count(f"{name}-ping-{number}", 1)
            told = self._await(f"{name}-pong-{number}", _ROUND_SECONDS)
            answered = timeline.wall()
            if told:
                rounds.append((answered - asked, told - (asked + answered) // 2))
        return min(rounds)[1] // 1000 if rounds else None

    def answer(self, name: str) -> None:
        """Tell a rank of another host the time, as often as it asks."""
        self._log_store.count(f"{name}-ready", 1)
        for number in range(_ROUNDS):
            if not self._await(f"{name}-ping-{number}", _ROUND_SECONDS):
                return
            self._log_store.count(f"{name}-pong-{number}", timeline.wall())

    def _await(self, name: str, seconds: float) -> int:
        """What another rank has counted; 0: nothing in time."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            told = self._log_store.count(name)
            if told:
                return told
        return 0
