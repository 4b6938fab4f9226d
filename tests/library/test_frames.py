"""Handshakes, messages and requests of ranks, cut and changed, without a network.

20,000 inputs each in `make soak`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from tests.repeats import SEED, times

from smdistributed.core.frames import Frame, FrameError, FrameReader, FrameWriter
from smdistributed.core.handshake import HandshakeError, Initiator, Responder
from smdistributed.core.store import parse_request

pytestmark = pytest.mark.soak

KEY, OTHER = b"k" * 32, b"o" * 32
fuzzed = settings(
    max_examples=times(100, 20_000), deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)
sizes = st.sampled_from([0, 1, 7, 8192, 131_071, 131_072, 140_000])
messages = st.lists(st.tuples(st.binary(max_size=40), st.lists(sizes, max_size=3)), max_size=4)
cuts = st.lists(st.integers(1, 9000), max_size=40)


def sent(given_messages: Sequence[tuple[bytes, Sequence[int]]]) -> tuple[list[Frame], list[bytes]]:
    """The messages, and the frames and bodies that carry them."""
    writer = FrameWriter(KEY)
    made: list[Frame] = [(head, [bytearray(b"x" * size) for size in bodies]) for head, bodies in given_messages]
    return made, [writer.frame(head, [memoryview(b) for b in bodies]) + b"".join(bodies) for head, bodies in made]


def read(stream: bytes, pieces: Sequence[int] = ()) -> tuple[list[Frame], bool]:
    """The messages that a reader delivers, and whether it refuses the rest."""
    reader, at, remaining = FrameReader(KEY), 0, iter(pieces)
    while at < len(stream):
        room = reader.buffer()
        data = stream[at : at + min(next(remaining, len(stream)), len(room))]
        room[: len(data)] = data
        at += len(data)
        try:
            reader.advance(len(data))
        except FrameError:
            return reader.take(), True
    return reader.take(), False


@seed(SEED)
@fuzzed
@given(messages, cuts)
def test_messages_arrive_however_they_are_cut(given_messages: list[tuple[bytes, list[int]]], pieces: list[int]) -> None:
    made, frames = sent(given_messages)
    assert read(b"".join(frames), pieces) == (made, False)


@seed(SEED)
@fuzzed
@given(st.binary(max_size=200), cuts)
def test_what_is_no_message_is_never_handed_out(stream: bytes, pieces: list[int]) -> None:
    assert read(stream, pieces)[0] == []


@seed(SEED)
@fuzzed
@given(messages, st.data())
def test_of_a_stream_that_is_changed_no_other_head_is_handed_out(
    given_messages: list[tuple[bytes, list[int]]], data: st.DataObject
) -> None:
    made, frames = sent(given_messages)
    stream = bytearray(b"".join(frames))
    how = data.draw(st.sampled_from(["change", "cut", "insert", "repeat", "swap"]))
    at = data.draw(st.integers(0, len(stream)))
    if how == "change" and at < len(stream):
        stream[at] ^= data.draw(st.integers(1, 255))
    elif how == "cut":
        del stream[at : at + data.draw(st.integers(1, 100))]
    elif how == "insert":
        stream[at:at] = data.draw(st.binary(min_size=1, max_size=100))
    elif how == "repeat" and frames:
        stream += frames[-1]
    elif how == "swap":
        stream = bytearray(b"".join(reversed(frames)))
    heads = [head for head, _ in read(bytes(stream))[0]]
    assert heads == [head for head, _ in made][: len(heads)]


def test_a_repeated_message_and_one_of_another_connection_are_refused() -> None:
    _, frames = sent([(b"head", [])])
    assert read(frames[0] * 2) == ([(b"head", [])], True)
    assert read(FrameWriter(OTHER).frame(b"head", [])) == ([], True)


def test_a_size_without_a_proof_takes_no_memory() -> None:
    """A head of 2^64 bytes, with 2^32 bodies."""
    reader = FrameReader(KEY)
    for _ in range(10):
        room = reader.buffer()
        room[:] = b"\xff" * len(room)
        reader.advance(len(room))
    assert reader.missing < 2 << 20


@pytest.mark.parametrize(("head", "body"), [(101, 0), (80, 13)])
def test_a_message_above_the_limit_is_refused_before_it_has_arrived(head: int, body: int) -> None:
    """A body counts, and 8 bytes for its length."""
    for most in (100, 101):
        frame = FrameWriter(KEY).frame(bytes(head), [memoryview(bytes(body))] if body else [])
        reader = FrameReader(KEY, most)
        arrived = frame[: 28 if head > 100 else len(frame)]
        reader.buffer()[: len(arrived)] = arrived
        if most == 100:
            with pytest.raises(FrameError, match="a message of 101 bytes"):
                reader.advance(len(arrived))
        else:
            reader.advance(len(arrived))


def shaken(initiator: Initiator, responder: Responder) -> bytes:
    """Go through the handshake; the last message."""
    answer = responder.feed(initiator.hello)
    reply = initiator.reply(answer)
    assert responder.feed(reply) == b""
    return reply


def test_both_sides_prove_that_they_have_the_key() -> None:
    initiator, responder = Initiator(KEY, 3, 5), Responder(KEY, 5)
    shaken(initiator, responder)
    assert responder.initiator == 3
    assert initiator.session == responder.session
    again = Initiator(KEY, 3, 5)
    shaken(again, Responder(KEY, 5))
    assert again.session != initiator.session


@pytest.mark.parametrize(
    ("initiator", "responder"),
    [
        (Initiator(KEY, 3, 5), Responder(OTHER, 5)),
        (Initiator(OTHER, 3, 5), Responder(KEY, 5)),
        (Initiator(KEY, 3, 6), Responder(KEY, 5)),
    ],
    ids=["impostor listens", "impostor calls", "another rank"],
)
def test_who_has_another_key_or_is_another_rank_is_refused(initiator: Initiator, responder: Responder) -> None:
    with pytest.raises(HandshakeError, match="another key"):
        initiator.reply(responder.feed(initiator.hello))
    with pytest.raises(HandshakeError, match="another key"):
        responder.feed(b"p" * 32)
    assert not initiator.session
    assert not responder.session


def test_what_was_recorded_of_a_handshake_proves_nothing() -> None:
    initiator = Initiator(KEY, 3, 5)
    reply = shaken(initiator, Responder(KEY, 5))
    later = Responder(KEY, 5)
    later.feed(initiator.hello)
    with pytest.raises(HandshakeError, match="another key"):
        later.feed(reply)


def test_an_answer_is_no_proof_of_a_caller() -> None:
    """Who has no key cannot use one responder, or its own words, to answer another."""
    responder, oracle = Responder(KEY, 5), Responder(KEY, 5)
    hello = Initiator(OTHER, 5, 5).hello
    responder.feed(hello)
    with pytest.raises(HandshakeError, match="another key"):
        responder.feed(oracle.feed(hello)[32:])


@seed(SEED)
@fuzzed
@given(st.booleans(), st.binary(max_size=100), st.lists(st.integers(1, 50), max_size=10))
def test_no_stranger_gets_through_a_handshake(begins_well: bool, data: bytes, pieces: list[int]) -> None:
    responder = Responder(KEY, 5)
    stream = (Initiator(OTHER, 3, 5).hello if begins_well else b"") + data
    try:
        for piece in [*pieces, 100, 100]:
            part, stream = stream[: min(piece, responder.missing_bytes)], stream[min(piece, responder.missing_bytes) :]
            assert len(responder.feed(part)) in (0, 64)
    except HandshakeError:
        pass
    assert not responder.session
    assert responder.missing_bytes <= 44


@seed(SEED)
@fuzzed
@given(st.binary(max_size=100))
def test_no_stranger_answers_a_caller(answer: bytes) -> None:
    initiator = Initiator(KEY, 3, 5)
    with pytest.raises(HandshakeError):
        initiator.reply(answer)
    assert not initiator.session


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
words = st.recursive(scalars | st.sampled_from(["get", "set", "add"]), lambda inner: st.lists(inner, max_size=4))


@seed(SEED)
@fuzzed
@given(st.binary(max_size=40) | words.map(lambda word: json.dumps(word).encode()))
def test_what_is_no_request_of_a_store_is_a_value_error(message: bytes) -> None:
    try:
        command, key, value = parse_request(message)
    except ValueError:
        return
    assert isinstance(key, str)
    assert type(value) in {"get": (int, float), "set": (str,), "add": (int,)}[command]


@pytest.mark.parametrize(
    "message",
    [b"[" * 100_000, b"7", b'["get", "a", 1e999]', b'["get", "a", -1]', b'["add", "a", true]', b'[[], "a", 1]'],
)
def test_requests_that_would_have_ended_their_thread(message: bytes) -> None:
    with pytest.raises(ValueError, match=r"no request|not a number|not enough"):
        parse_request(message)
