"""How builds look while they run: a live line each on a terminal, plain lines elsewhere; the whole log in a file."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column

from shoal.builds.events import Event, Failed, Output, Step
from shoal.sources.debian import NOT_LOCKED
from shoal.sources.steps import one_line

TAIL_LINES = 20


def screen(console: Console, tags: Iterable[str]) -> Progress:
    """Return what shows a live line for each build that is under way, while it is used as a context manager."""
    width = max(map(len, tags), default=0)
    return Progress(
        SpinnerColumn(),
        TextColumn("[bold]{task.fields[tag]}", table_column=Column(no_wrap=True, min_width=width)),
        TextColumn("step {task.completed:.0f}/{task.total:.0f}", table_column=Column(no_wrap=True, min_width=10)),
        TimeElapsedColumn(table_column=Column(no_wrap=True, min_width=7)),
        TextColumn("{task.fields[command]}", markup=False, table_column=Column(no_wrap=True, ratio=1)),
        console=console,
        expand=True,
        disable=not console.is_terminal or console.is_dumb_terminal,
        transient=True,
    )


class BuildProgress:
    """Shows the events of one image's build on `live`, and keeps its log and what a failure must tell.

    Use as a context manager. `failed_step` and `tail` (the last lines it printed) describe the failing step;
    `not_locked` are the Debian packages that steps have installed and that the lock does not have.
    """

    def __init__(self, tag: str, log: Path, live: Progress) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.failed_step: Step | None = None
        self.failure: str = ""
        self.not_locked: list[str] = []
        self._tag, self._live = tag, live
        self._log = log.open("w", encoding="utf-8")
        self._tails: dict[str, deque[str]] = {}
        self._started = time.monotonic()
        self._task = live.add_task("", total=1, tag=tag, command="sending the context")
        self._command = ""

    def __enter__(self) -> BuildProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.remove_task(self._task)
        self._log.close()

    @property
    def tail(self) -> list[str]:
        """The last lines that the failing step printed."""
        return list(self._tails.get(self.failed_step.key, ())) if self.failed_step else []

    def show(self, event: Event) -> None:
        """Take in the next event."""
        if isinstance(event, Step):
            self._step(event)
        elif isinstance(event, Output):
            self._write(f"    {event.line}")
            self._tails.setdefault(event.key, deque(maxlen=TAIL_LINES)).append(event.line)
            if event.line.startswith(NOT_LOCKED):
                self.not_locked.append(event.line.removeprefix(NOT_LOCKED))
            if event.line.strip():
                self._live.update(self._task, command=f"{self._command} · {event.line.strip()}")
        elif isinstance(event, Failed):
            self.failure = event.message
            self._write(f"failed: {event.message}")

    def note(self, text: str) -> None:
        """Write a line into the log file only."""
        self._write(text)

    def _step(self, step: Step) -> None:
        if step.state == "failed" and (self.failed_step is None or not self.failed_step.number):
            self.failed_step = step
        line = f"[{step.number}/{step.total}] {step.state:<7} {step.seconds:6.1f} s  {one_line(step.command)}"
        self._write(line)
        if not step.number:
            return
        self._command = one_line(step.command, 30)
        self._live.update(self._task, total=step.total, completed=step.number, command=one_line(step.command))
        if self._live.disable:
            self._live.console.print(f"{self._tag} {line}", markup=False, highlight=False, soft_wrap=True)

    def _write(self, line: str) -> None:
        self._log.write(f"{time.monotonic() - self._started:8.1f} {line}\n")
