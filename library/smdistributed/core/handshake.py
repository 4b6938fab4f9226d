"""How two processes of a job prove to each other that they have its key, before either believes the other a word.

1. Who connects sends a hello: its rank and a nonce.
2. Who listens answers with a nonce of its own and a proof: an HMAC-SHA-256 over its role, both ranks and both nonces.
3. Who connects checks that proof, and sends its own.

All three are flat and of fixed length, and nothing more is read of a stranger. From the key and the nonces both derive
a key for this connection alone: what somebody has recorded of another one proves nothing.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct

from smdistributed.core.sockets import read_exactly, read_some

_PROTOCOL = b"smdist-2"
_HELLO = struct.Struct("!8sI32s")  # the protocol, the rank, a nonce
_ANSWER = struct.Struct("!32s32s")  # a nonce, a proof
_PROOF_BYTES = 32
_RANK = struct.Struct("!I")


class HandshakeError(ConnectionError):
    """The other side does not have the job's key, or is no process of a job."""


class Caller:
    """The side that connects.

    key: the job's. rank: who calls. to: the rank that must answer, and no other.
    """

    def __init__(self, key: bytes, rank: int, to: int) -> None:
        self._key, self._to = key, to
        self.hello = _HELLO.pack(_PROTOCOL, rank, secrets.token_bytes(32))
        self.session = b""
        """The key of the connection; empty until the other side has proved itself."""

    def reply(self, answer: bytes) -> bytes:
        """The last message, for the answer to `hello`. Raises HandshakeError if it proves nothing."""
        if len(answer) != _ANSWER.size:
            raise HandshakeError(f"an answer of {len(answer)} bytes: it must have {_ANSWER.size}")
        nonce, proof = _ANSWER.unpack(answer)
        said = self.hello + nonce + _RANK.pack(self._to)
        if not hmac.compare_digest(proof, _mac(self._key, b"listener", said)):
            raise HandshakeError("the other side has another key, or is no process of this job")
        self.session = _mac(self._key, b"session", said)
        return _mac(self._key, b"caller", said)


class Listener:
    """The side that listens: give it what comes, however it is cut.

    key: the job's. rank: who listens.
    """

    def __init__(self, key: bytes, rank: int) -> None:
        self._key, self._rank = key, rank
        self._hello = self._said = b""
        self._came = b""
        self.caller = -1
        """The rank that calls, when `session` is there."""
        self.session = b""
        """The key of the connection; empty until the other side has proved itself."""

    @property
    def wanted(self) -> int:
        """How many bytes the next message still lacks: no more may be given."""
        return (_PROOF_BYTES if self._said else _HELLO.size) - len(self._came)

    def feed(self, data: bytes) -> bytes:
        """Take so many bytes; what to send now, mostly nothing. Raises HandshakeError for what proves nothing."""
        if len(data) > self.wanted or self.session:
            raise HandshakeError("more bytes than a handshake has")
        self._came += data
        if not self._said and self._came[: len(_PROTOCOL)] != _PROTOCOL[: len(self._came)]:
            raise HandshakeError("the other side speaks another protocol")
        if self.wanted:
            return b""
        came, self._came = self._came, b""
        if not self._said:
            return self._answer(came)
        if not hmac.compare_digest(came, _mac(self._key, b"caller", self._said)):
            raise HandshakeError("the other side has another key")
        self.caller = _HELLO.unpack(self._hello)[1]
        self.session = _mac(self._key, b"session", self._said)
        return b""

    def _answer(self, hello: bytes) -> bytes:
        nonce = secrets.token_bytes(32)
        self._hello, self._said = hello, hello + nonce + _RANK.pack(self._rank)
        return _ANSWER.pack(nonce, _mac(self._key, b"listener", self._said))


def call(sock: socket.socket, key: bytes, rank: int, to: int, deadline: float) -> bytes:
    """Go through the handshake on a connection that this side has made; returns the connection's key.

    Raises HandshakeError if the other side proves nothing, OSError or EOFError if it ends the connection, or takes
    longer than `deadline` (by time.monotonic).
    """
    caller = Caller(key, rank, to)
    sock.sendall(caller.hello)
    sock.sendall(caller.reply(read_exactly(sock, _ANSWER.size, deadline)))
    return caller.session


def accept(sock: socket.socket, key: bytes, rank: int, deadline: float) -> bytes:
    """The same on a connection that the other side has made; raises as `call` does."""
    listener = Listener(key, rank)
    while not listener.session:
        sock.sendall(listener.feed(read_some(sock, listener.wanted, deadline)))
    return listener.session


def _mac(key: bytes, role: bytes, said: bytes) -> bytes:
    return hmac.digest(key, role + b":" + said, "sha256")
