"""How two processes of a job prove to each other that they have its key, before they exchange anything else.

1. The initiator, which connects, sends a hello: its rank and a nonce.
2. The responder, which listens, answers with a nonce of its own and a proof. The proof is an HMAC-SHA-256 over its
   role, both ranks and both nonces.
3. The initiator checks that proof, and sends its own.

All three messages are flat and of fixed length. Nothing else is read from a peer that is not authenticated. From the
key and the nonces, both sides derive a key for this connection. So a recording of another connection proves nothing.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time

_PROTOCOL = b"smdist-2"
_HELLO = struct.Struct("!8sI32s")  # the protocol, the rank, a nonce
_ANSWER = struct.Struct("!32s32s")  # a nonce, a proof
_PROOF_BYTES = 32
_RANK = struct.Struct("!I")


class HandshakeError(ConnectionError):
    """The other side does not have the job's key, or is not a process of a job."""


class Initiator:
    def __init__(self, key: bytes, rank: int, to: int) -> None:
        self._key, self._to = key, to
        self.hello = _HELLO.pack(_PROTOCOL, rank, secrets.token_bytes(32))
        self.session = b""
        """The key of the connection; empty until the other side has proved itself."""

    def reply(self, answer: bytes) -> bytes:
        """Returns the last message, and sets `session`. Raises HandshakeError if the answer is wrong."""
        if len(answer) != _ANSWER.size:
            raise HandshakeError(f"an answer of {len(answer)} bytes: it must have {_ANSWER.size}")
        nonce, proof = _ANSWER.unpack(answer)
        transcript = self.hello + nonce + _RANK.pack(self._to)
        if not hmac.compare_digest(proof, _mac(self._key, b"listener", transcript)):
            raise HandshakeError("the other side has another key, or is not a process of this job")
        self.session = _mac(self._key, b"session", transcript)
        return _mac(self._key, b"caller", transcript)


class Responder:
    """The side that listens. It takes the initiator's bytes in pieces of any size."""

    def __init__(self, key: bytes, rank: int) -> None:
        self._key, self._rank = key, rank
        self._hello = self._transcript = b""
        self._received = b""
        self.initiator = -1
        """The rank that connects, once `session` is set."""
        self.session = b""
        """The key of the connection; empty until the other side has proved itself."""

    @property
    def missing_bytes(self) -> int:
        """How many bytes the next message still lacks. `feed` takes no more."""
        return (_PROOF_BYTES if self._transcript else _HELLO.size) - len(self._received)

    def feed(self, data: bytes) -> bytes:
        """Takes bytes and returns those to send. At the end sets `initiator` and `session`. Raises HandshakeError."""
        if len(data) > self.missing_bytes or self.session:
            raise HandshakeError("more bytes than a handshake has")
        self._received += data
        if not self._transcript and self._received[: len(_PROTOCOL)] != _PROTOCOL[: len(self._received)]:
            raise HandshakeError("the other side speaks another protocol")
        if self.missing_bytes:
            return b""
        received, self._received = self._received, b""
        if not self._transcript:
            return self._answer(received)
        if not hmac.compare_digest(received, _mac(self._key, b"caller", self._transcript)):
            raise HandshakeError("the other side has another key")
        self.initiator = _HELLO.unpack(self._hello)[1]
        self.session = _mac(self._key, b"session", self._transcript)
        return b""

    def _answer(self, hello: bytes) -> bytes:
        nonce = secrets.token_bytes(32)
        self._hello, self._transcript = hello, hello + nonce + _RANK.pack(self._rank)
        return _ANSWER.pack(nonce, _mac(self._key, b"listener", self._transcript))


def initiate_handshake(sock: socket.socket, key: bytes, rank: int, to: int, deadline: float) -> bytes:
    """Authenticates both sides of a connection that this side has made.

    Args:
        sock: The connection.
        key: The job's key.
        rank, to: This rank, and the one that must answer.
        deadline: When to give up, in seconds of time.monotonic.

    Returns:
        The connection's key.

    Raises:
        HandshakeError: If the other side does not have the job's key.
        OSError: If the connection fails, or the deadline passes. EOFError if the other side ends it.
    """
    initiator = Initiator(key, rank, to)
    sock.sendall(initiator.hello)
    answer = b""
    while len(answer) < _ANSWER.size:
        answer += _read(sock, _ANSWER.size - len(answer), deadline)
    sock.sendall(initiator.reply(answer))
    return initiator.session


def answer_handshake(sock: socket.socket, key: bytes, rank: int, deadline: float) -> bytes:
    """As `initiate_handshake`, on the side that listens; returns the connection's key. `rank` is this rank."""
    responder = Responder(key, rank)
    while not responder.session:
        sock.sendall(responder.feed(_read(sock, responder.missing_bytes, deadline)))
    return responder.session


def _read(sock: socket.socket, most: int, deadline: float) -> bytes:
    """Waits until the deadline, and returns 1 to `most` bytes. Raises OSError, or EOFError if the connection ends."""
    sock.settimeout(max(deadline - time.monotonic(), 1e-3))
    part = sock.recv(most)
    if not part:
        raise EOFError("the connection has ended")
    return part


def _mac(key: bytes, role: bytes, transcript: bytes) -> bytes:
    return hmac.digest(key, role + b":" + transcript, "sha256")
