"""Shows running builds: a live line for each on a terminal, plain lines elsewhere, and the whole log in a file."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column

from shoal.builds.buildkit import BuildFailed, Event, OutputLine, StepEvent
from shoal.console import print_line
from shoal.sources.debian import NOT_LOCKED
from shoal.sources.steps import one_line

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
