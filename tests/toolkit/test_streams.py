"""Lines and tails of the ranks' output."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_toolkit.loop import Loop
from shoal_toolkit.streams import Flow, Lines, Sink, Source, Tail

PIECES = st.lists(st.text("ab \né\t").map(str.encode))


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


@given(PIECES)
def test_each_line_is_marked_once_and_no_byte_is_lost(pieces: list[bytes]) -> None:
    lines = Lines(b"[0,a] ")
    out = b"".join([*(lines.feed(piece) for piece in pieces), lines.flush()])
    text = b"".join(pieces)
    expected = [b"[0,a] " + line + b"\n" for line in text.split(b"\n")]
    if text.endswith(b"\n") or not text:
        expected.pop()
    assert out == b"".join(expected)


def test_a_line_waits_for_its_end() -> None:
    lines = Lines(b"> ")
    assert lines.feed(b"  two ") == b""
    assert lines.feed("halves é".encode()[:-1]) == b""
    assert lines.feed("é".encode()[1:] + b"\nnext") == b"> " + "  two halves é\n".encode()
    assert lines.flush() == b"> next\n"


def test_a_progress_bar_moves() -> None:
    assert Lines(b"> ").feed(b"10%\r") == b"> 10%\r"


@given(st.lists(st.binary(max_size=9)))
def test_the_tail_is_the_end(chunks: list[bytes]) -> None:
    tail = Tail(size=16)
    for chunk in chunks:
        tail.add(chunk)
    assert tail.text() == b"".join(chunks)[-16:].decode("utf-8", "replace")


def test_a_full_sink_stops_its_sources_and_an_empty_one_lets_them_go_on(loop: Loop) -> None:
    """More than fits into memory passes, in order, and no writer waits for ever."""
    flow = Flow()
    in_read, in_write = os.pipe()
    out_read, out_write = os.pipe()
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
    os.close(out_read)
    os.close(out_write)


def test_a_sink_that_nobody_reads_does_not_stop_the_job(loop: Loop, capfd: pytest.CaptureFixture[str]) -> None:
    out_read, out_write = os.pipe()
    os.close(out_read)
    sink = Sink(loop, out_write, Flow())
    sink.write(b"lost")
    loop.step()
    sink.write(b"lost too")
    assert sink.empty
    os.close(out_write)
    assert capfd.readouterr().err.count("nobody reads descriptor") == 1


def test_what_is_left_of_a_pipe_is_read_even_if_somebody_writes_for_ever(loop: Loop) -> None:
    """What a script leaves behind in a session of its own must not hold the job."""
    in_read, in_write = os.pipe()
    os.write(in_write, b"x" * 1000)
    received = 0

    def passed(data: bytes) -> None:
        nonlocal received
        received += len(data)
        assert received < 8 << 20, "does not end"
        os.write(in_write, data)

    Source(loop, Flow(), in_read, passed).finish()
    assert received >= 65536, "not even what a pipe holds"
    os.close(in_write)
