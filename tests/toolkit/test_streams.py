"""Lines and tails of the ranks' output."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_toolkit.output.lines import Lines, Tail, TextLines
from shoal_toolkit.output.pipes import FlowControl, Sink, Source
from shoal_toolkit.system.loop import Loop, Timer

PIECES = st.lists(st.text("ab \né\t").map(str.encode))
PIECES_WITH_RETURNS = st.lists(st.text("ab\r\n").map(str.encode))
MARK = b"[0,a] "


@given(PIECES)
def test_each_line_is_marked_once_and_no_byte_is_lost(pieces: list[bytes]) -> None:
    lines = Lines(MARK)
    out = b"".join([*(lines.feed(piece) for piece in pieces), lines.flush()])
    text = b"".join(pieces)
    expected = [MARK + line + b"\n" for line in text.split(b"\n")]
    if text.endswith(b"\n") or not text:
        expected.pop()
    assert out == b"".join(expected)


def test_a_line_waits_for_its_end() -> None:
    lines = Lines(b"> ")
    assert lines.feed(b"  two ") == b""
    assert lines.feed("halves é".encode()[:-1]) == b""
    assert lines.feed("é".encode()[1:] + b"\nnext") == b"> " + "  two halves é\n".encode()
    assert lines.flush() == b"> next\n"


@given(PIECES_WITH_RETURNS)
def test_each_piece_of_a_progress_bar_is_marked_once_and_no_byte_is_lost(pieces: list[bytes]) -> None:
    """However the bytes arrive: a line ends with \\n, \\r\\n or \\r."""
    lines = Lines(MARK)
    out = b"".join([*(lines.feed(piece) for piece in pieces), lines.flush()])
    ended = re.findall(rb"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+\Z", b"".join(pieces))
    expected = b"".join(MARK + line for line in ended)
    assert out == (expected if not ended or ended[-1][-1:] in (b"\r", b"\n") else expected + b"\n")


def test_a_progress_bar_moves() -> None:
    """Each step is passed on as it comes, not when the line ends."""
    lines = Lines(b"> ")
    assert [lines.feed(step) for step in (b"10%\r", b"20%\r", b"done\n")] == [b"> 10%\r", b"> 20%\r", b"> done\n"]


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"a\nb", b"c\n\n", b"end"], ["a", "bc", "", "end"]),
        (["é".encode()[:1], "é".encode()[1:] + b"\n"], ["é"]),
        ([b"\r 10%", b"\r 20%\r", b"\n"], [" 10%", " 20%"]),
        ([b"a\r", b"\nb\r\n\r\nc\n"], ["a", "b", "", "c"]),
        ([b"\xff\n"], ["\\xff"]),
    ],
)
def test_texts_of_lines(pieces: list[bytes], expected: list[str]) -> None:
    lines = TextLines()
    assert [line for piece in pieces for line in lines.feed(piece)] + lines.flush() == expected


@given(st.lists(st.binary(max_size=9)))
def test_the_tail_has_the_last_bytes(chunks: list[bytes]) -> None:
    tail = Tail(size=16)
    for chunk in chunks:
        tail.add(chunk)
    assert tail.text() == b"".join(chunks)[-16:].decode("utf-8", "replace")


def a_pipe() -> tuple[int, int]:
    return os.pipe()


def a_socket() -> tuple[int, int]:
    """It cannot be opened again: the sink has to poll before each piece."""
    left, right = socket.socketpair()
    return left.detach(), right.detach()


@pytest.mark.parametrize("connected", [a_pipe, a_socket])
def test_a_full_sink_stops_its_sources_and_an_empty_one_lets_them_go_on(
    loop: Loop, connected: Callable[[], tuple[int, int]]
) -> None:
    """More than fits into memory passes, in order, and no writer waits for ever."""
    flow = FlowControl()
    in_read, in_write = os.pipe()
    out_read, out_write = connected()
    flags = fcntl.fcntl(out_write, fcntl.F_GETFL)
    sink = Sink(loop, out_write, flow)
    held: list[int] = []

    def passed(data: bytes) -> None:
        sink.write(data * 64)
        held.append(sink._held)

    source = Source(loop, flow, in_read, passed)
    pid = os.fork()
    if pid == 0:
        for _ in range(64):
            os.write(in_write, bytes(range(256)) * 16)
        os._exit(0)
    os.close(in_write)
    received = bytearray()
    os.set_blocking(out_read, False)
    while len(received) < 64 * 64 * 4096:
        loop.step()
        try:
            received += os.read(out_read, 1 << 20)
        except BlockingIOError:
            continue
    os.waitpid(pid, 0)
    source.finish()
    assert bytes(received) == bytes(range(256)) * (16 * 64 * 64)
    assert max(held) < 8 << 20
    assert fcntl.fcntl(out_write, fcntl.F_GETFL) == flags, "others share the descriptor: it must go on to block"
    sink.close()
    os.close(out_read)
    os.close(out_write)


@pytest.mark.parametrize("connected", [a_pipe, a_socket])
def test_a_sink_that_nobody_reads_does_not_stop_the_job(
    loop: Loop, capfd: pytest.CaptureFixture[str], connected: Callable[[], tuple[int, int]]
) -> None:
    out_read, out_write = connected()
    os.close(out_read)
    sink = Sink(loop, out_write, FlowControl())
    sink.write(b"lost")
    while not sink.empty:
        loop.step()
    sink.write(b"lost too")
    assert sink.empty
    sink.close()
    os.close(out_write)
    assert capfd.readouterr().err.count(f"descriptor {out_write} cannot be written any more") == 1


def test_a_file_is_appended_to_where_another_process_has_got_to(loop: Loop, tmp_path: Path) -> None:
    """A shell's `>file` is one place for all who write there: a description of its own would overwrite it."""
    with (tmp_path / "log").open("wb") as file:
        sink = Sink(loop, file.fileno(), FlowControl())
        sink.write(b"ours\n")
        os.write(file.fileno(), b"theirs\n")
        sink.write(b"ours again\n")
        assert sink.empty
        sink.close()
    assert (tmp_path / "log").read_bytes() == b"ours\ntheirs\nours again\n"


def test_what_waits_in_a_sink_is_written_when_it_closes(loop: Loop) -> None:
    out_read, out_write = a_socket()
    sink = Sink(loop, out_write, FlowControl())
    sink.write(b"last words")
    sink.close()
    assert os.read(out_read, 99) == b"last words"
    os.close(out_read)
    os.close(out_write)


def test_a_writer_of_single_lines_does_not_keep_a_core_busy_here(loop: Loop) -> None:
    read, write = os.pipe()
    pieces: list[int] = []
    source = Source(loop, FlowControl(), read, lambda data: pieces.append(len(data)))
    pid = os.fork()
    if pid == 0:
        for number in range(20_000):
            os.write(write, b"line %5d\n" % number)
        os._exit(0)
    os.close(write)
    while sum(pieces) < 11 * 20_000:
        loop.step()
    os.waitpid(pid, 0)
    source.finish()
    assert len(pieces) < 2_000


def test_a_line_is_read_at_once(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A longer rest between two reads would show in every line's delay, and a busy machine not in the least delay."""
    rests: list[float] = []
    call_later = loop.call_later

    def rest(seconds: float, callback: Callable[[], None]) -> Timer:
        rests.append(seconds)
        return call_later(seconds, callback)

    monkeypatch.setattr(loop, "call_later", rest)
    read, write = os.pipe()
    seen: list[float] = []
    source = Source(loop, FlowControl(), read, lambda _: seen.append(time.monotonic()))
    delays = []
    for count in range(1, 41):
        began = time.monotonic()
        os.write(write, b"line\n")
        while len(seen) < count:
            loop.step()
        delays.append(seen[-1] - began)
    assert min(delays[1:]) < 0.02  # the first line finds no rest
    assert len(rests) <= 40
    assert max(rests) < 0.02
    os.close(write)
    source.finish()


def test_what_is_left_of_a_pipe_is_read_even_if_somebody_writes_for_ever(loop: Loop) -> None:
    """Processes that a script left in a session of their own must not hold the job."""
    in_read, in_write = os.pipe()
    os.write(in_write, b"x" * 1000)
    received = 0

    def passed(data: bytes) -> None:
        nonlocal received
        received += len(data)
        assert received < 8 << 20, "does not end"
        os.write(in_write, data)

    Source(loop, FlowControl(), in_read, passed).finish()
    assert received >= 65536, "not even what a pipe holds"
    os.close(in_write)
