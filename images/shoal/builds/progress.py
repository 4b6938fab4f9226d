"""Shows running builds: a live line for each on a terminal, plain lines elsewhere, and the whole log in a file.

BuildKit inside Docker answers `POST /build?version=2` with JSON lines. The ones with the id `moby.buildkit.trace`
carry a base64 protobuf message, `StatusResponse` of BuildKit's public control API. A few of its fields are needed.
"""

from __future__ import annotations

import base64
import re
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column

from shoal.builds.debian_lock import NOT_LOCKED
from shoal.console import print_line
from shoal.protobuf import split_fields
from shoal.sources.steps import one_line

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


TAIL_LINES = 20


def make_display(console: Console, tags: Iterable[str]) -> Progress:
    """Returns a display with a live line for each running build. Use it as a context manager.

    Its lines vanish at the end. Without a terminal it shows nothing: `BuildProgress` then prints plain lines on its
    console.
    """
    width = max(map(len, tags), default=0)
    return Progress(
        SpinnerColumn(),
        TextColumn(
            "{task.fields[tag]}", style="bold", markup=False, table_column=Column(no_wrap=True, min_width=width)
        ),
        TextColumn("step {task.completed:.0f}/{task.total:.0f}", table_column=Column(no_wrap=True, min_width=10)),
        TimeElapsedColumn(table_column=Column(no_wrap=True, min_width=7)),
        TextColumn("{task.fields[command]}", markup=False, table_column=Column(no_wrap=True, ratio=1)),
        console=console,
        expand=True,
        disable=not console.is_terminal or console.is_dumb_terminal,
        transient=True,
    )


class BuildProgress:
    """Shows the events of one image's build on a display, writes its log, and keeps the cause of a failure.

    Use it as a context manager. Creating it opens the log file, and replaces an earlier one. `failed_step` and `tail`,
    the last lines that it printed, describe the failing step. `not_locked` are the Debian packages that steps installed
    and the lock does not have.
    """

    def __init__(self, tag: str, log: Path, display: Progress) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.failed_step: StepEvent | None = None
        self.failure: str = ""
        self.not_locked: list[str] = []
        self._tag, self._display = tag, display
        self._log = log.open("w", encoding="utf-8")
        self._tails: dict[str, deque[str]] = {}
        self._started = time.monotonic()
        self._task = display.add_task("", total=1, tag=tag, command="sending the context")
        self._command = ""

    def __enter__(self) -> BuildProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._display.remove_task(self._task)
        self._log.close()

    @property
    def tail(self) -> list[str]:
        """The last lines that the failing step printed."""
        return list(self._tails.get(self.failed_step.key, ())) if self.failed_step else []

    def show(self, event: Event) -> None:
        """Shows the next event and writes it to the log.

        Keeps the last lines, the failure and packages that left the lock.
        """
        if isinstance(event, StepEvent):
            self._step(event)
        elif isinstance(event, OutputLine):
            self._write(f"    {event.line}")
            self._tails.setdefault(event.key, deque(maxlen=TAIL_LINES)).append(event.line)
            if event.line.startswith(NOT_LOCKED):
                self.not_locked.append(event.line.removeprefix(NOT_LOCKED))
            if event.line.strip():
                self._display.update(self._task, command=f"{self._command} · {event.line.strip()}")
        elif isinstance(event, BuildFailed):
            self.failure = event.message
            self._write(f"failed: {event.message}")

    def log_note(self, text: str) -> None:
        """Writes a line into the log file only."""
        self._write(text)

    def _step(self, step: StepEvent) -> None:
        """The first failed step, a numbered one if possible, becomes `failed_step`. Internal steps are only logged."""
        if step.state == "failed" and (self.failed_step is None or not self.failed_step.number):
            self.failed_step = step
        line = f"[{step.number}/{step.total}] {step.state:<7} {step.seconds:6.1f} s  {one_line(step.command)}"
        self._write(line)
        if not step.number:
            return
        self._command = one_line(step.command, 30)
        self._display.update(self._task, total=step.total, completed=step.number, command=one_line(step.command))
        if self._display.disable:
            print_line(f"{self._tag} {line}", self._display.console)

    def _write(self, line: str) -> None:
        self._log.write(f"{time.monotonic() - self._started:8.1f} {line}\n")
