"""Compares the clocks of a group's hosts through the store, so that the timelines of several hosts align.

When a recording has begun, a rank of each host asks rank 0 for the time several times. The fastest answer gives the
best offset, accurate to half of its duration. The other ranks of the host take the offset over.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from smdistributed.core import timeline
from smdistributed.core.store import StoreLog

_ROUNDS = 10
_ROUND_SECONDS = 0.5


class Clocks:
    """Compares this host's clock with rank 0's, once for each recording. `hosts` has the host of each rank."""

    def __init__(self, log: StoreLog, rank: int, hosts: Sequence[str], poll_seconds: float) -> None:
        self._log, self._rank, self._poll_seconds = log, rank, poll_seconds
        self._is_on_first_host = hosts[rank] == hosts[0]
        self._host = hosts.index(hosts[rank])
        self._recording: timeline.Recorder | None = None
        self._recordings = 0
        self._known = True

    def compare(self) -> None:
        """Sets the clock offset once for each new recording, except on rank 0's host. It may wait for seconds."""
        running = timeline.recorder
        if running is not self._recording:
            self._recording = running
            self._recordings += running is not None
            self._known = running is None or self._is_on_first_host
        if not self._known:
            self._find_offset(f"clock-{self._recordings}-{self._host}")

    def _find_offset(self, name: str) -> None:
        """Sets the offset if the log has it. A host's first rank to call this measures it, without a second try."""
        if not self._log.read(f"{name}-requested") and self._log.append(f"{name}-requested", None) == 1:
            offset = self._measure(name)
            if offset is not None:
                self._log.append(name, offset)
        for offset in self._log.read(name)[:1]:
            timeline.set_clock_offset(offset)
            self._known = True

    def _measure(self, name: str) -> int | None:
        """Returns the microseconds by which rank 0's clock is ahead, by the fastest round; None: it does not answer."""
        self._log.append("messages", {"kind": "clock", "rank": self._rank, "name": name})
        if not self._await_count(f"{name}-ready", 2 * self._poll_seconds + _ROUND_SECONDS):
            return None
        rounds = []
        for number in range(_ROUNDS):
            sent = timeline.wall()
            self._log.count(f"{name}-ping-{number}", 1)
            answer = self._await_count(f"{name}-pong-{number}", _ROUND_SECONDS)
            received = timeline.wall()
            if answer:
                rounds.append((received - sent, answer - (sent + received) // 2))
        return min(rounds)[1] // 1000 if rounds else None

    def answer(self, name: str) -> None:
        """Sends the time to a rank of another host; runs on rank 0. It blocks, and stops if a question is late."""
        self._log.count(f"{name}-ready", 1)
        for number in range(_ROUNDS):
            if not self._await_count(f"{name}-ping-{number}", _ROUND_SECONDS):
                return
            self._log.count(f"{name}-pong-{number}", timeline.wall())

    def _await_count(self, name: str, seconds: float) -> int:
        """Asks the store without pauses until a counter is not 0, and returns it; 0: nothing in time."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            value = self._log.count(name)
            if value:
                return value
        return 0
