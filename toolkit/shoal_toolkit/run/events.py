"""The events of the processes on a host."""

from __future__ import annotations

from typing import Protocol


class HostEvents(Protocol):
    """Called for events of the processes on this host, and of its ranks."""

    def on_rank_started(self, rank: int) -> None:
        """A rank has started."""

    def on_rank_ended(self, rank: int, code: int) -> None:
        """A rank that a launcher started has ended with an exit code."""

    def on_rank_output(self, stream: int, rank: int, data: bytes) -> None:
        """A rank wrote something to stdout (1) or stderr (2)."""

    def on_launcher_output(self, stream: int, data: bytes) -> None:
        """The launcher, a set-up command or a sidecar wrote something."""

    def on_command_ended(self, code: int) -> None:
        """The script or launcher has ended, and all of its output was passed on."""

    def on_sidecar_ended(self, name: str, code: int) -> None:
        """A sidecar has ended, before the job or at its end."""
