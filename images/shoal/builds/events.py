"""What a build tells while it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Step:
    """A step changed its state. `number` and `total` count the image's steps; both are 0 for the builder's own chores.

    `seconds` is the step's duration so far.
    """

    key: str
    number: int
    total: int
    command: str
    state: Literal["started", "cached", "done", "failed"]
    seconds: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class Output:
    """A line that the running command of step `key` printed."""

    key: str
    line: str


@dataclass(frozen=True)
class Failed:
    """The build ended in an error."""

    message: str


Event = Step | Output | Failed
