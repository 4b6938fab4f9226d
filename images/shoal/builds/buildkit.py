"""BuildKit's progress stream → events.

BuildKit inside Docker answers `POST /build?version=2` with JSON lines; the ones with the id `moby.buildkit.trace`
carry a base64 protobuf message, `StatusResponse` of BuildKit's public control API. A few fields of its messages are
needed.
"""

from __future__ import annotations

import base64
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from shoal.protobuf import split_fields

Fields = dict[int, list[Any]]
_STEP = re.compile(r"^\[(?:[\w.-]+ +)?(\d+)/(\d+)\] (.*)$", re.DOTALL)


@dataclass(frozen=True)
class StepEvent:
    """A step changed its state, after `seconds`. `number` of `total` is 0 of 0 for BuildKit's internal steps."""

    key: str
    number: int
    total: int
    command: str
    state: Literal["started", "cached", "done", "failed"]
    seconds: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class OutputLine:
    """A line that the running command of step `key` printed."""

    key: str
    line: str


@dataclass(frozen=True)
class BuildFailed:
    """The build ended in an error."""

    message: str


Event = StepEvent | OutputLine | BuildFailed


def _decode(message: bytes) -> Fields:
    """Returns a protobuf message's fields: number → values in order; nested messages and strings stay bytes."""
    fields: Fields = defaultdict(list)
    for number, value in split_fields(message):
        fields[number].append(value)
    return fields


def read_events(stream: Iterable[Mapping[str, Any]]) -> Iterator[Event]:
    """Translates Docker's JSON objects into events: lines of output, states of steps (each once), the build's error.

    An unfinished line of a step is yielded before the step's end. Other objects are skipped.
    """
    known: set[tuple[str, str]] = set()
    partial: dict[str, bytes] = {}
    for entry in stream:
        if entry.get("id") == "moby.buildkit.trace":
            status = _decode(base64.b64decode(entry["aux"]))
            for log in map(_decode, status[3]):
                yield from _lines(log, partial)
            for vertex in map(_decode, status[1]):
                if (step := _step(vertex)) and (step.key, step.state) not in known:
                    known.add((step.key, step.state))
                    if step.state != "started" and (rest := partial.pop(step.key, b"")):
                        yield OutputLine(step.key, rest.decode(errors="replace"))
                    yield step
        elif "error" in entry:
            yield BuildFailed(str(entry["error"]))


def _step(vertex: Fields) -> StepEvent | None:
    name = _text(vertex, 3)
    match = _STEP.match(name)
    number, total, command = (int(match[1]), int(match[2]), match[3]) if match else (0, 0, name)
    started, completed = _seconds(vertex, 5), _seconds(vertex, 6)
    error = _text(vertex, 7)
    if started is None:
        return None
    elapsed = completed - started if completed is not None else 0.0
    if error:
        return StepEvent(_text(vertex, 1), number, total, command, "failed", elapsed, error)
    if completed is not None:
        return StepEvent(_text(vertex, 1), number, total, command, "cached" if any(vertex[4]) else "done", elapsed)
    return StepEvent(_text(vertex, 1), number, total, command, "started")


def _lines(log: Fields, partial: dict[str, bytes]) -> Iterator[OutputLine]:
    """Keeps the rest in `partial`, by step, as bytes: a chunk may end within a character."""
    key = _text(log, 1)
    text = partial.pop(key, b"") + b"".join(log[4][-1:])
    *whole, rest = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    if rest:
        partial[key] = rest
    yield from (OutputLine(key, line.decode(errors="replace")) for line in whole)


def _text(fields: Fields, number: int) -> str:
    return b"".join(fields[number][-1:]).decode(errors="replace")


def _seconds(fields: Fields, number: int) -> float | None:
    """Returns the seconds of a Timestamp field (1 seconds, 2 nanoseconds); None if there is none."""
    if not fields[number]:
        return None
    stamp = _decode(fields[number][-1])
    return float(sum(stamp[1])) + sum(stamp[2]) / 1e9
