"""What hosts say to each other: a frame is parsed into a message here, and checked, before anybody acts on it.

A frame has a kind (1 byte) and a payload: a flat JSON object with exactly the fields of its kind, or bytes for output.
Whatever else comes raises ProtocolError, and nothing but that. What a message asks for is not judged here.
"""

from __future__ import annotations

import json
import signal
import struct
from collections.abc import Callable, Mapping

from shoal_toolkit.light_typing import Any, NamedTuple

VERSION = 5
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_HEXADECIMAL = frozenset("0123456789abcdef")
_MOST_DIGITS = 20  # of 64 bits
_MOST_FIELDS = 4096  # a fact for each mount that is full
_OUTPUT = struct.Struct("!BI")
OUTPUT = b"o"


class ProtocolError(Exception):
    """The other side sent what no peer of ours sends, or sends at this time."""


# The handshake


class Hello(NamedTuple):
    """Worker: who it is."""

    version: int
    host: str
    nonce: str


class Prove(NamedTuple):
    """First host: its proof of the secret."""

    nonce: str
    hosts: str
    proof: str


class Welcome(NamedTuple):
    """Worker: the proof was right, and here is its own."""

    proof: str


class Refused(NamedTuple):
    """Worker: the proof was wrong. Nobody has proved anything: anybody may say this."""

    reason: str


# First host → worker


class Start(NamedTuple):
    """Start mpirun's daemon."""

    command: str


class Signal(NamedTuple):
    """Pass a signal on."""

    number: int


class Decided(NamedTuple):
    """The result of the job."""

    code: int
    message: str
    report: Mapping[str, Any]


# Worker → first host


class Started(NamedTuple):
    """A rank starts."""

    rank: int


class Output(NamedTuple):
    """A rank has written something."""

    stream: int
    rank: int
    data: bytes


class RankEnded(NamedTuple):
    """A rank has ended."""

    rank: int
    code: int
    facts: Mapping[str, int]


class Ended(NamedTuple):
    """This host's own command, or its daemon, has ended."""

    code: int
    stderr: str
    failed_rank: int | None
    facts: Mapping[str, int]
    unrecorded: str


class Failed(NamedTuple):
    """This host cannot take part."""

    code: int
    message: str


class Stopping(NamedTuple):
    """This host was told to stop."""

    signal: int


class Word(NamedTuple):
    """A frame that is all in its kind: PING, GO or READY."""

    kind: bytes


PING, GO, READY = Word(b"."), Word(b"G"), Word(b"r")
Handshake = (Hello, Prove, Welcome, Refused)


# What a field may be


def _whole(most: int) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if type(value) is not int or not 0 <= value <= most:
            raise ProtocolError(f"a number that is not from 0 to {most}")
        return value

    return check


def _digest(length: int) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if not isinstance(value, str) or len(value) != length or not _HEXADECIMAL.issuperset(value):
            raise ProtocolError(f"no {length} hexadecimal digits")
        return value

    return check


def _text(value: Any) -> Any:
    if not isinstance(value, str):
        raise ProtocolError("a field that is no text")
    return value


def _line(value: Any) -> Any:
    """What is logged of somebody who has proved nothing: no line of its own, and nothing that a terminal obeys."""
    if not _text(value).isprintable():
        raise ProtocolError("a text of other than printable characters")
    return value


def _rank_or_none(value: Any) -> Any:
    return None if value is None else _rank(value)


def _stop_signal(value: Any) -> Any:
    if type(value) is not int or value not in STOP_SIGNALS:
        raise ProtocolError("a signal that stops no job")
    return value


def _facts(value: Any) -> Any:
    """What explains a failure: a number for each name."""
    if not isinstance(value, dict) or len(value) > _MOST_FIELDS or {type(item) for item in value.values()} - {int}:
        raise ProtocolError("facts that are no numbers")
    return value


def _report(value: Any) -> Any:
    """The fields of job.json: scalars, and lists of text."""
    if not isinstance(value, dict) or len(value) > _MOST_FIELDS:
        raise ProtocolError("a report that is no object")
    for item in value.values():
        for each in item if isinstance(item, list) else [item]:
            if isinstance(each, (dict, list)):
                raise ProtocolError("a report that is not flat")
    return value


_rank = _whole(1 << 20)
_code = _whole(1 << 16)
_nonce, _proof = _digest(32), _digest(64)
_FORMS: dict[bytes, tuple[Any, tuple[Callable[[Any], Any], ...]]] = {
    b"H": (Hello, (_whole(1 << 16), _text, _nonce)),
    b"P": (Prove, (_nonce, _proof, _proof)),
    b"W": (Welcome, (_proof,)),
    b"R": (Refused, (_line,)),
    b"S": (Start, (_text,)),
    b"K": (Signal, (_stop_signal,)),
    b"V": (Decided, (_code, _text, _report)),
    b"s": (Started, (_rank,)),
    b"n": (RankEnded, (_rank, _code, _facts)),
    b"e": (Ended, (_code, _text, _rank_or_none, _facts, _text)),
    b"f": (Failed, (_code, _text)),
    b"t": (Stopping, (_stop_signal,)),
}
_KINDS = {make: kind for kind, (make, _) in _FORMS.items()}


def encode(message: Any) -> tuple[bytes, bytes]:
    """Return the kind and the payload of a message."""
    if isinstance(message, Word):
        return message.kind, b""
    if isinstance(message, Output):
        return OUTPUT, _OUTPUT.pack(message.stream, message.rank) + message.data
    return _KINDS[type(message)], json.dumps(dict(zip(message._fields, message))).encode()


def parse(kind: bytes, payload: bytes, proved: bool) -> Any:
    """Return the message of a frame. Raises ProtocolError, and nothing else, for what is none.

    proved: Whether the other side has proved the secret. Until then only the handshake is understood.
    """
    make, checks = _FORMS.get(kind, (None, ()))
    if not proved and make not in Handshake:
        raise ProtocolError(f"the kind {kind!r} before the handshake is over")
    if kind == OUTPUT:
        return _output(payload)
    if kind in (PING.kind, GO.kind, READY.kind):
        return Word(kind)
    if make is None:
        raise ProtocolError(f"the kind {kind!r}")
    fields = _object(payload, flat=make in Handshake)
    if fields.keys() != set(make._fields):
        raise ProtocolError(f"other fields than {', '.join(make._fields)}")
    return make(*(check(fields[name]) for name, check in zip(make._fields, checks)))


def _output(payload: bytes) -> Output:
    if len(payload) < _OUTPUT.size:
        raise ProtocolError("output without a rank")
    stream, rank = _OUTPUT.unpack_from(payload)
    if stream not in (1, 2):
        raise ProtocolError(f"output of the stream {stream}")
    return Output(stream, _rank(rank), payload[_OUTPUT.size :])


def _object(payload: bytes, flat: bool) -> dict[str, Any]:
    if flat and (payload.count(b"{") != 1 or b"[" in payload):
        raise ProtocolError("a payload that is not flat")
    try:
        value = json.loads(payload.decode(), parse_int=_integer, parse_float=_number, parse_constant=_number)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a payload that is no JSON ({error})") from None
    if not isinstance(value, dict):
        raise ProtocolError("a payload that is no object")
    return value


def _integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ProtocolError("a number that is too long")
    return int(digits)


def _number(digits: str) -> float:
    number = float(digits) if len(digits) <= 2 * _MOST_DIGITS else float("inf")
    if number - number != 0:
        raise ProtocolError("a number that is not finite")
    return number
