"""The console of commands: rich's, with clean text in all that it writes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment

from shoal.clean_text import clean_log_line, clean_message, clean_text


@dataclass(frozen=True)
class LogLines:
    """Lines of a job's log, each from `clean_log_line` and with its end. They may have colours."""

    text: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Segment(self.text)


class CleanConsole(Console):
    """Cleans the text of all that is rendered: lines, tables, progress bars. Names of emoji are not replaced."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(highlight=False, emoji=False, **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yields the segments of an object. Only the colours of `LogLines` stay, and rich's own control codes."""
        segments = super().render(renderable, options)
        if isinstance(renderable, LogLines):
            yield from segments
            return
        for segment in segments:
            yield segment if segment.control else segment._replace(text=clean_text(segment.text))


console = CleanConsole()


def print_line(text: str, on: Console = console) -> None:
    """Prints a message without markup and without wrapping it. Its further lines are indented."""
    on.print(clean_message(text), markup=False, highlight=False, emoji=False, soft_wrap=True)


def print_lines(texts: Iterable[str], on: Console = console) -> None:
    """Prints messages, one after the other."""
    for text in texts:
        print_line(text, on)


def print_log_lines(lines: Iterable[str], on: Console) -> None:
    """Prints lines of a job's log. On a terminal they are cleaned; elsewhere they stay unchanged."""
    if on.file.isatty():
        on.print(LogLines("".join(f"{clean_log_line(line)}\n" for line in lines)), soft_wrap=True, end="")
    else:
        for line in lines:
            on.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)
