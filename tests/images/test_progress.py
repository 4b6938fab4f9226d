"""What builders say → events → what a person sees."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from shoal.builds import progress
from shoal.builds.progress import BuildFailed, BuildProgress, OutputLine, StepEvent
from shoal.protobuf import split_fields
from shoal.sources.steps import one_line

from .buildkit_stream import field, log, stamp, trace, varint, vertex


def test_wire_format_of_all_types() -> None:
    message = field(1, 300) + varint(2 << 3 | 1) + b"12345678" + varint(3 << 3 | 5) + b"1234" + field(4, b"text")
    assert list(split_fields(message)) == [(1, 300), (2, b"12345678"), (3, b"1234"), (4, b"text")]


def test_an_unknown_wire_type_is_an_error() -> None:
    with pytest.raises(ValueError, match="wire type 3"):
        list(split_fields(varint(1 << 3 | 3)))


def test_buildkit_steps_logs_and_failure() -> None:
    name = "[build  3/10] RUN pip install"
    stream = [
        {"stream": "ignored"},
        trace(vertex(name)),
        trace(vertex(name, field(5, stamp(100)))),
        trace(vertex(name, field(5, stamp(100)))),
        trace(log(b"one\ntw")),
        trace(log(b"o\r50%\r100%\ncaf\xc3")),
        trace(log(b"\xa9, and no line end")),
        trace(vertex(name, field(5, stamp(100)), field(6, stamp(102, 500_000_000)), field(7, b"exit code: 1"))),
        {"error": "process did not complete"},
    ]
    assert list(progress.read_events(stream)) == [
        StepEvent("sha256:1", 3, 10, "RUN pip install", "started"),
        *(OutputLine("sha256:1", line) for line in ("one", "two", "50%", "100%", "café, and no line end")),
        StepEvent("sha256:1", 3, 10, "RUN pip install", "failed", 2.5, "exit code: 1"),
        BuildFailed("process did not complete"),
    ]


def test_buildkit_cached_step_and_chore() -> None:
    done = (field(5, stamp(5)), field(6, stamp(5)))
    stream = [trace(vertex("[1/2] FROM base", *done, field(4, 1))), trace(vertex("exporting to image", *done))]
    first, second = progress.read_events(stream)
    assert first == StepEvent("sha256:1", 1, 2, "FROM base", "cached")
    assert second == StepEvent("sha256:1", 0, 0, "exporting to image", "done")


@contextlib.contextmanager
def show(log: Path, console: Console) -> Iterator[BuildProgress]:
    with progress.make_display(console, ["image:1"]) as live, BuildProgress("image:1", log, live) as shown:
        yield shown
        live.refresh()


def test_plain_lines_and_log_file(tmp_path: Path) -> None:
    screen = io.StringIO()
    path = tmp_path / "logs" / "build.log"
    with show(path, Console(file=screen, width=80)) as shown:
        shown.show(StepEvent("a", 2, 7, "RUN --mount=type=cache,target=/x \\\n    pip  install", "started"))
        for number in range(30):
            shown.show(OutputLine("a", f"line {number}"))
        shown.show(StepEvent("a", 2, 7, "RUN x", "failed", 3.0, "exit code: 1"))
        shown.show(BuildFailed("it failed"))
    assert "image:1 [2/7] started" in screen.getvalue()
    assert "RUN pip install" in screen.getvalue()
    assert "line 3" not in screen.getvalue()
    assert "line 3\n" in path.read_text()
    assert shown.failure == "it failed"
    assert shown.tail == [f"line {number}" for number in range(10, 30)]


def test_a_dumb_terminal_shows_plain_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    screen = io.StringIO()
    with show(tmp_path / "log", Console(file=screen, force_terminal=True)) as shown:
        shown.show(StepEvent("a", 2, 7, "RUN pip install", "started"))
    assert "image:1 [2/7] started" in screen.getvalue()


def test_a_terminal_shows_one_live_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    screen = io.StringIO()
    console = Console(file=screen, width=120, force_terminal=True)
    with show(tmp_path / "log", console) as shown:
        shown.show(StepEvent("a", 2, 7, "RUN pip install", "started"))
        shown.show(OutputLine("a", "Collecting torch"))
    text = screen.getvalue()
    assert "step 2/7" in text
    assert "Collecting torch" in text


def test_one_line_is_cut() -> None:
    assert one_line("RUN " + "x" * 300, 20) == "RUN " + "x" * 15 + "…"
