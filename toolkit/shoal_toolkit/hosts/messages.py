"""The messages between hosts, and how they are encoded. Every frame is parsed and checked before anything acts on it.

A frame has a kind (1 byte) and a payload: a JSON object with exactly the fields of its kind, or bytes for output. In
the handshake the object must be flat. Anything else raises ProtocolError, and no other error. Whether a message is
allowed at this time is not checked here.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence

from shoal_toolkit.fast_typing import Any, NamedTuple
from shoal_toolkit.system.loop import STOP_SIGNALS

VERSION = 8

_HEXADECIMAL = frozenset("0123456789abcdef")
_MAX_DIGITS = 20  # of a number of 64 bits
_MAX_FIELDS = 4096  # there is a fact for each full mount
_OUTPUT = struct.Struct("!BI")
OUTPUT = b"o"


class ProtocolError(Exception):
    """The other side sent a frame that is wrong, or wrong at this time."""


# The handshake


class Hello(NamedTuple):
    """Worker: its name."""

    version: int
    host: str
    nonce: str


class Prove(NamedTuple):
    """First host: its proof of the secret."""

    nonce: str
    hosts: str
    proof: str


class Welcome(NamedTuple):
    """Worker: the proof was right; contains the proof of the worker."""

    proof: str


class Refused(NamedTuple):
    """Worker: the proof was wrong. Not authenticated: anybody may send this."""

    reason: str


# Before the job, where hosts know only the first one's address (registration.py)


class Register(NamedTuple):
    """Another host → first host: its rank."""

    rank: int


class Addresses(NamedTuple):
    """First host → the others: the addresses of all hosts, in the order of their ranks."""

    hosts: Sequence[str]


# First host → worker


class StartDaemon(NamedTuple):
    """Start mpirun's daemon."""

    command: str


class Measure(NamedTuple):
    """Measure the way to another host, in a preflight."""

    host: str
    port: int


class PassSignal(NamedTuple):
    """Send a signal to the ranks."""

    number: int


class PrepareRestart(NamedTuple):
    """End your processes, and get ready for the next start of the job."""

    number: int  # restarts of the job so far
    reason: str


class NextHosts(NamedTuple):
    """These hosts take part in the next start, a part of all hosts. Sent before a start of an elastic job."""

    hosts: Sequence[str]


class JobEnded(NamedTuple):
    """The result of the job, and job.json."""

    code: int
    message: str
    report: Mapping[str, Any]


# Worker → first host


class Facts(NamedTuple):
    """Facts about this host that must fit the other hosts' facts. Sent before Ready."""

    facts: Mapping[str, Any]


class Measured(NamedTuple):
    """The way from this host to another one, in a preflight."""

    host: str
    microseconds: int  # there and back
    bytes_per_second: int
    skew_ms: int  # how far the other host's clock is ahead
    problem: str  # empty if it was measured


class RankStarted(NamedTuple):
    """A rank has started."""

    rank: int


class RankOutput(NamedTuple):
    """A rank has written something."""

    stream: int
    rank: int
    data: bytes


class RankEnded(NamedTuple):
    """A rank has ended."""

    rank: int
    code: int
    facts: Mapping[str, int]


class CommandEnded(NamedTuple):
    """The command of this host, or its daemon of mpirun, has ended."""

    code: int
    stderr: str
    failed_rank: int | None
    facts: Mapping[str, int]
    unrecorded: str  # why this host can't write a success; empty if it can


class Ready(NamedTuple):
    """This host can start."""

    number: int  # of the last Restart that this host got; 0 before


class HostFailed(NamedTuple):
    """This host can't take part."""

    number: int  # as in Ready
    code: int
    message: str
    restartable: bool  # whether another start may succeed


class StopReceived(NamedTuple):
    """This host received a signal that stops the job."""

    signal: int


class Bare(NamedTuple):
    """A message without fields: PING, GO (start your own command), or PAUSE (end your ranks for a restart)."""

    kind: bytes


PING, GO, PAUSE = Bare(b"."), Bare(b"G"), Bare(b"p")
Handshake = (Hello, Prove, Welcome, Refused)


# Checks of a field: each returns the value, or raises ProtocolError


def _check_whole_number(most: int) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if type(value) is not int or not 0 <= value <= most:
            raise ProtocolError(f"a number that is not from 0 to {most}")
        return value

    return check


def _check_digest(length: int) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if not isinstance(value, str) or len(value) != length or not _HEXADECIMAL.issuperset(value):
            raise ProtocolError(f"a field that is not {length} hexadecimal digits")
        return value

    return check


def _check_text(value: Any) -> Any:
    if not isinstance(value, str):
        raise ProtocolError("a field that is not text")
    return value


def _check_flag(value: Any) -> Any:
    if type(value) is not bool:
        raise ProtocolError("a flag that is neither true nor false")
    return value


def _check_line(value: Any) -> Any:
    if not _check_text(value).isprintable():
        raise ProtocolError("a text with unprintable characters")
    return value


def _check_optional_rank(value: Any) -> Any:
    return None if value is None else _check_rank(value)


def _check_integer(value: Any) -> Any:
    if type(value) is not int:
        raise ProtocolError("a number that is not whole")
    return value


def _check_stop_signal(value: Any) -> Any:
    if type(value) is not int or value not in STOP_SIGNALS:
        raise ProtocolError("a signal that does not stop a job")
    return value


def _check_facts(value: Any) -> Any:
    if not isinstance(value, dict) or len(value) > _MAX_FIELDS or {type(item) for item in value.values()} - {int}:
        raise ProtocolError("facts that are not numbers")
    return value


def _check_report(value: Any) -> Any:
    """Allows scalars, lists of scalars, and the list of restarts, which are flat objects."""
    if not isinstance(value, dict) or len(value) > _MAX_FIELDS:
        raise ProtocolError("a report that is not an object")
    for name, item in value.items():
        entries = item if isinstance(item, list) else [item]
        if name == "restarts":
            entries = [field for each in entries for field in (each.values() if isinstance(each, dict) else [each])]
        if any(isinstance(entry, (dict, list)) for entry in entries):
            raise ProtocolError("a report that is not flat")
    return value


def _check_hosts(value: Any) -> Any:
    if not isinstance(value, list) or len(value) > _MAX_FIELDS or not all(isinstance(host, str) for host in value):
        raise ProtocolError("hosts that are not a list of texts")
    return value


_check_rank = _check_whole_number(1 << 20)
_check_amount = _check_whole_number(1 << 60)
_check_code = _check_whole_number(1 << 16)
_check_nonce, _check_proof = _check_digest(32), _check_digest(64)
_FIELDS: dict[bytes, tuple[Any, tuple[Callable[[Any], Any], ...]]] = {
    b"H": (Hello, (_check_whole_number(1 << 16), _check_text, _check_nonce)),
    b"P": (Prove, (_check_nonce, _check_proof, _check_proof)),
    b"W": (Welcome, (_check_proof,)),
    b"R": (Refused, (_check_line,)),
    b"g": (Register, (_check_rank,)),
    b"A": (Addresses, (_check_hosts,)),
    b"S": (StartDaemon, (_check_text,)),
    b"K": (PassSignal, (_check_stop_signal,)),
    b"V": (JobEnded, (_check_code, _check_text, _check_report)),
    b"m": (Measure, (_check_text, _check_code)),
    b"M": (Measured, (_check_text, _check_amount, _check_amount, _check_integer, _check_text)),
    b"c": (Facts, (_check_report,)),
    b"s": (RankStarted, (_check_rank,)),
    b"n": (RankEnded, (_check_rank, _check_code, _check_facts)),
    b"e": (CommandEnded, (_check_code, _check_text, _check_optional_rank, _check_facts, _check_text)),
    b"B": (NextHosts, (_check_hosts,)),
    b"N": (PrepareRestart, (_check_code, _check_line, _check_flag)),
    b"r": (Ready, (_check_code,)),
    b"f": (HostFailed, (_check_code, _check_code, _check_text, _check_flag)),
    b"t": (StopReceived, (_check_stop_signal,)),
}
_KINDS = {make: kind for kind, (make, _) in _FIELDS.items()}


def encode_message(message: Any) -> tuple[bytes, bytes]:
    """Returns the kind and the payload of a message."""
    if isinstance(message, Bare):
        return message.kind, b""
    if isinstance(message, RankOutput):
        return OUTPUT, _OUTPUT.pack(message.stream, message.rank) + message.data
    return _KINDS[type(message)], json.dumps(dict(zip(message._fields, message))).encode()


def parse_message(kind: bytes, payload: bytes, proved: bool) -> Any:
    """Parses a frame, and returns its message.

    Args:
        proved: Whether the other side has proved the secret. Until then only messages of the handshake are allowed.

    Raises:
        ProtocolError: If the frame is wrong. No other error is raised.
    """
    make, checks = _FIELDS.get(kind, (None, ()))
    if not proved and make not in Handshake:
        raise ProtocolError(f"the kind {kind!r} before the end of the handshake")
    if kind == OUTPUT:
        return _parse_output(payload)
    if kind in (PING.kind, GO.kind, PAUSE.kind):
        return Bare(kind)
    if make is None:
        raise ProtocolError(f"the kind {kind!r}")
    fields = _parse_object(payload, flat=make in Handshake)
    if fields.keys() != set(make._fields):
        raise ProtocolError(f"fields other than {', '.join(make._fields)}")
    return make(*(check(fields[name]) for name, check in zip(make._fields, checks)))


def _parse_output(payload: bytes) -> RankOutput:
    if len(payload) < _OUTPUT.size:
        raise ProtocolError("output without a rank")
    stream, rank = _OUTPUT.unpack_from(payload)
    if stream not in (1, 2):
        raise ProtocolError(f"output of the stream {stream}")
    return RankOutput(stream, _check_rank(rank), payload[_OUTPUT.size :])


def _parse_object(payload: bytes, flat: bool) -> dict[str, Any]:
    """Parses a JSON object without long or infinite numbers. `flat` refuses nested objects and lists unparsed."""
    if flat and (payload.count(b"{") != 1 or b"[" in payload):
        raise ProtocolError("a payload that is not flat")
    try:
        value = json.loads(
            payload.decode(), parse_int=_parse_integer, parse_float=_parse_float, parse_constant=_parse_float
        )
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a payload that is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ProtocolError("a payload that is not an object")
    return value


def _parse_integer(digits: str) -> int:
    # A longer number would take quadratic time.
    if len(digits) > _MAX_DIGITS:
        raise ProtocolError("a number that is too long")
    return int(digits)


def _parse_float(digits: str) -> float:
    """Returns a finite number. Raises ProtocolError for NaN, infinity, or more than 40 characters."""
    number = float(digits) if len(digits) <= 2 * _MAX_DIGITS else float("inf")
    if number - number != 0:
        raise ProtocolError("a number that is not finite")
    return number
