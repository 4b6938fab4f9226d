"""Connections between two hosts: frames over TCP, heartbeats, and proofs of the job's secret.

A frame is a length (4 bytes, big-endian, without itself), a kind (1 byte) and a payload. See messages.py. After the
handshake each frame ends with a tag (16 bytes). Its key is derived from the secret and from this handshake. A frame
that is added, changed, repeated or removed on the way ends the connection.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from time import monotonic

from shoal_toolkit.fast_typing import Any
from shoal_toolkit.hosts import messages
from shoal_toolkit.hosts.messages import PING, ProtocolError
from shoal_toolkit.system.loop import READ, WRITE, Loop, Timer

MAX_FRAME = 1 << 20
MAX_HANDSHAKE_FRAME = 4096
HANDSHAKE_SECONDS = 10.0
HEARTBEAT_SECONDS = 1.0
LOST_SECONDS = 10.0  # longer than a short network failure, shorter than users are willing to wait

_HEAD = struct.Struct("!Ic")
_TAG_BYTES = 16


class Seal:
    """Makes and checks the tags of the frames in one direction of a connection, in order."""

    def __init__(self, key: bytes) -> None:
        self._key, self._count = key, 0

    def make_tag(self, kind: bytes, payload: bytes) -> bytes:
        """Returns the tag of the next frame. Each call counts one frame."""
        mac = hashlib.blake2b(self._count.to_bytes(8, "big") + kind, key=self._key, digest_size=_TAG_BYTES)
        mac.update(payload)
        self._count += 1
        return mac.digest()

    def check(self, kind: bytes, sealed: bytes) -> bytes:
        """Checks the tag of the next frame, and returns the payload without it.

        Raises ProtocolError if the tag is wrong.
        """
        payload, tag = sealed[:-_TAG_BYTES], sealed[-_TAG_BYTES:]
        if not hmac.compare_digest(tag, self.make_tag(kind, payload)):
            raise ProtocolError("a frame that was changed, or is out of order")
        return payload


class Channel:
    """A connected, non-blocking socket that sends and receives messages.

    Calls `on_message(message)` for each message, and `on_lost(reason)` once if the connection is lost. If `on_message`
    raises ProtocolError, because the message is wrong at this time, the connection is lost. Other errors are bugs, and
    are not caught here.
    """

    def __init__(
        self, loop: Loop, sock: socket.socket, on_message: Callable[[Any], None], on_lost: Callable[[str], None]
    ) -> None:
        self.on_message = on_message
        self.on_lost = on_lost
        self.on_held: Callable[[int], None] = lambda _: None  # called with the number of bytes that wait to be sent
        self._seals: tuple[Seal, Seal] | None = None  # of this side and of the other, after the handshake
        self._loop = loop
        self._sock: socket.socket | None = sock
        self._in = bytearray()
        self._out: deque[memoryview] = deque()
        self._unsent = 0
        self._last_heard = monotonic()
        self._beat: Timer | None = None
        self._paused = False
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        loop.watch(sock.fileno(), READ, self._on_readable)

    @property
    def open(self) -> bool:
        """Whether the connection is neither closed nor lost."""
        return self._sock is not None

    def start(self, seals: tuple[Seal, Seal]) -> None:
        """Ends the handshake: frames have tags, a heartbeat is sent each second, and after 10 s of silence it is lost.

        Args:
            seals: The seal of this side, and of the other.
        """
        self._seals = seals
        self._last_heard = monotonic()
        self._heartbeat()

    def send(self, message: Any) -> None:
        """Queues a message, and sends as much as the socket takes now. Does nothing if the connection is closed.

        If sending fails, the loop calls `on_lost` later.
        """
        if self._sock is None:
            return
        kind, payload = messages.encode_message(message)
        if self._seals is not None:
            payload += self._seals[0].make_tag(kind, payload)
        self._out.append(memoryview(_HEAD.pack(len(payload) + 1, kind) + payload))
        self._unsent += _HEAD.size + len(payload)
        self._flush()

    def close(self) -> None:
        """Closes the connection without calling `on_lost`."""
        if self._sock is None:
            return
        if self._beat:
            self._beat.cancel()
        self._loop.unwatch(self._sock.fileno(), READ)
        self._loop.unwatch(self._sock.fileno(), WRITE)
        self._sock.close()
        self._sock = None

    def pause(self) -> None:
        """Stops reading. Until `resume`, silence does not mean that the connection is lost."""
        if self._sock is not None:
            self._loop.unwatch(self._sock.fileno(), READ)
            self._paused = True

    def resume(self) -> None:
        """Reads again after `pause`. The time of silence is counted from now on."""
        if self._sock is not None:
            self._loop.watch(self._sock.fileno(), READ, self._on_readable)
            self._paused = False
            self._last_heard = monotonic()

    def _lose(self, reason: str) -> None:
        if self._sock is not None:
            self.close()
            self.on_lost(reason)

    def _heartbeat(self) -> None:
        """Runs each second: loses a silent connection, and sends a PING if nothing waits to be sent."""
        silent = monotonic() - self._last_heard
        if silent > LOST_SECONDS and not self._paused:
            self._lose(f"it was silent for {silent:.0f} s")
            return
        if not self._out:
            self.send(PING)
        self._beat = self._loop.call_later(HEARTBEAT_SECONDS, self._heartbeat)

    def _flush(self) -> None:
        """Sends as much as the socket takes now. The loop sends the rest, or reports the connection as lost."""
        sock = self._sock
        try:
            while sock is not None and self._out:
                first = self._out[0]
                sent = sock.send(first)
                self._unsent -= sent
                self._out[0] = first[sent:]
                if sent == len(first):
                    self._out.popleft()
        except BlockingIOError:
            self._loop.watch(sock.fileno(), WRITE, self._flush)  # type: ignore[union-attr]
        except OSError as error:
            # Reported later by the loop, because the caller of `send` does not expect it.
            self._out.clear()
            self._unsent = 0
            reason = str(error)
            self._loop.call_later(0, lambda: self._lose(reason))
        else:
            if sock is not None:
                self._loop.unwatch(sock.fileno(), WRITE)
        self.on_held(self._unsent)

    def _on_readable(self) -> None:
        """An end, an error or a wrong frame loses the connection."""
        if self._sock is None:
            return
        try:
            data = self._sock.recv(262144)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(str(error))
            return
        if not data:
            self._lose("it closed the connection")
            return
        self._last_heard = monotonic()
        self._in += data
        try:
            self._deliver()
        except ProtocolError as error:
            self._lose(f"it sent a wrong frame ({error})")

    def _deliver(self) -> None:
        """Passes on all complete messages but heartbeats. Removes their bytes only at the end: linear time."""
        start = 0
        try:
            while self._sock is not None and len(self._in) - start >= _HEAD.size:
                size, kind = _HEAD.unpack_from(self._in, start)
                seals = self._seals
                if not 1 <= size <= (MAX_HANDSHAKE_FRAME if seals is None else MAX_FRAME + _TAG_BYTES):
                    raise ProtocolError(f"a frame of {size} bytes")
                end = start + _HEAD.size + size - 1
                if len(self._in) < end:
                    return
                payload = bytes(self._in[start + _HEAD.size : end])
                if seals is not None:
                    payload = seals[1].check(kind, payload)
                message = messages.parse_message(kind, payload, seals is not None)
                start = end
                if message != PING:
                    self.on_message(message)
        finally:
            del self._in[:start]


def make_nonce() -> str:
    """Returns a random number for one handshake, as 32 hexadecimal digits."""
    return os.urandom(16).hex()


def hash_hosts(hosts: Sequence[str]) -> str:
    """Returns a hash of the host list. It keeps hosts of different jobs from joining each other."""
    return hashlib.sha256("\n".join(hosts).encode()).hexdigest()


def make_transcript(hosts: Sequence[str], worker: str, first_nonce: str, worker_nonce: str) -> dict[str, str]:
    """Returns the facts that the proofs of a handshake cover.

    Args:
        hosts: All hosts of the job, the first host first.
    """
    names = {"first": hosts[0], "worker": worker, "hosts": hash_hosts(hosts)}
    return {**names, "first_nonce": first_nonce, "worker_nonce": worker_nonce}


def make_proof(secret: str, role: str, transcript: Mapping[str, str]) -> str:
    """Returns a proof that this host knows the job's secret.

    Args:
        role: "first" or "worker", so that the other side can't send the proof back.
        transcript: See `make_transcript`.

    Returns:
        64 hexadecimal digits.
    """
    text = json.dumps([messages.VERSION, role, sorted(transcript.items())])
    return hmac.new(secret.encode("utf-8", "surrogateescape"), text.encode(), "sha256").hexdigest()


def make_seals(secret: str, role: str, transcript: Mapping[str, str]) -> tuple[Seal, Seal]:
    """Returns the seals of `role` and of the other side. Arguments as for `make_proof`."""
    other = "worker" if role == "first" else "first"
    own, others = (Seal(bytes.fromhex(make_proof(secret, f"frames of {each}", transcript))) for each in (role, other))
    return own, others


def equal_proofs(left: str, right: object) -> bool:
    """Compares proofs in constant time."""
    return isinstance(right, str) and hmac.compare_digest(left.encode(), right.encode())


def look_up_host(host: str, port: int) -> list[tuple[int, tuple[Any, ...]]]:
    """Returns (family, address) pairs of a host. Raises OSError if its name is unknown, maybe only for now."""
    # As bytes: for text, Python imports its codec for names with other letters, which takes 2 ms.
    found = socket.getaddrinfo(host.encode() if host.isascii() else host, port, type=socket.SOCK_STREAM)
    return [(family, address) for family, _, _, _, address in found]
