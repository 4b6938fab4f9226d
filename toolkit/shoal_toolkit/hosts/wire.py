"""The connection between two hosts: frames over TCP, heartbeats, and the proofs of the job's secret.

A frame is a length (4 bytes, big-endian, without itself), a kind (1 byte) and a payload: see messages.py. After the
handshake a tag follows (16 bytes). Its key comes from the secret and from this handshake, so that nobody between the
hosts adds, changes, repeats or leaves out a frame.
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

from shoal_toolkit.hosts import messages
from shoal_toolkit.hosts.messages import PING, ProtocolError
from shoal_toolkit.light_typing import Any
from shoal_toolkit.system.loop import READ, WRITE, Loop, Timer

MAX_FRAME = 1 << 20
MAX_HANDSHAKE_FRAME = 4096
HANDSHAKE_SECONDS = 10.0
HEARTBEAT_SECONDS = 1.0
LOST_SECONDS = 10.0  # longer than a network that stumbles, shorter than a user's patience

_HEAD = struct.Struct("!Ic")
_TAG_BYTES = 16


class Seal:
    """Makes the tags of the frames that go one way on a connection, one after the other."""

    def __init__(self, key: bytes) -> None:
        self._key, self._count = key, 0

    def tag(self, kind: bytes, payload: bytes) -> bytes:
        mac = hashlib.blake2b(self._count.to_bytes(8, "big") + kind, key=self._key, digest_size=_TAG_BYTES)
        mac.update(payload)
        self._count += 1
        return mac.digest()

    def open(self, kind: bytes, sealed: bytes) -> bytes:
        """Return a payload without its tag. Raises ProtocolError if the tag is wrong."""
        payload, tag = sealed[:-_TAG_BYTES], sealed[-_TAG_BYTES:]
        if not hmac.compare_digest(tag, self.tag(kind, payload)):
            raise ProtocolError("a frame that was changed on its way, or is not the next one")
        return payload


class Channel:
    """A connected, non-blocking socket. Calls `on_message(message)`, and `on_lost(reason)` once when it ends.

    `on_message` raises ProtocolError for a message that is not due; the connection is then lost. An error of any other
    kind is a mistake of ours, and is not caught here.
    """

    def __init__(
        self, loop: Loop, sock: socket.socket, on_message: Callable[[Any], None], on_lost: Callable[[str], None]
    ) -> None:
        self.on_message = on_message
        self.on_lost = on_lost
        self.on_held: Callable[[int], None] = lambda _: None  # told how many bytes wait to be sent
        self._seals: tuple[Seal, Seal] | None = None  # of this side and of the other, once that has proved itself
        self._loop = loop
        self._sock: socket.socket | None = sock
        self._in = bytearray()
        self._out: deque[memoryview] = deque()
        self._held = 0
        self._last_heard = monotonic()
        self._beat: Timer | None = None
        self._paused = False
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        loop.watch(sock.fileno(), READ, self._readable)

    @property
    def open(self) -> bool:
        return self._sock is not None

    def start(self, seals: tuple[Seal, Seal]) -> None:
        """The handshake is over. Frames have tags from now on, by the seals of this side and of the other.

        Both sides speak at least every few seconds, or the connection is lost.
        """
        self._seals = seals
        self._last_heard = monotonic()
        self._heartbeat()

    def send(self, message: Any) -> None:
        """Queue a message; what the socket takes is sent at once."""
        if self._sock is None:
            return
        kind, payload = messages.encode(message)
        if self._seals is not None:
            payload += self._seals[0].tag(kind, payload)
        self._out.append(memoryview(_HEAD.pack(len(payload) + 1, kind) + payload))
        self._held += _HEAD.size + len(payload)
        self._flush()

    def close(self) -> None:
        """Close without a word to on_lost."""
        if self._sock is None:
            return
        if self._beat:
            self._beat.cancel()
        self._loop.unwatch(self._sock.fileno(), READ)
        self._loop.unwatch(self._sock.fileno(), WRITE)
        self._sock.close()
        self._sock = None

    def pause(self) -> None:
        """Do not read for now. Silence is no sign of a loss then."""
        if self._sock is not None:
            self._loop.unwatch(self._sock.fileno(), READ)
            self._paused = True

    def resume(self) -> None:
        if self._sock is not None:
            self._loop.watch(self._sock.fileno(), READ, self._readable)
            self._paused = False
            self._last_heard = monotonic()

    def _lose(self, reason: str) -> None:
        if self._sock is not None:
            self.close()
            self.on_lost(reason)

    def _heartbeat(self) -> None:
        silent = monotonic() - self._last_heard
        if silent > LOST_SECONDS and not self._paused:
            self._lose(f"nothing was heard from it for {silent:.0f} s")
            return
        if not self._out:
            self.send(PING)
        self._beat = self._loop.call_later(HEARTBEAT_SECONDS, self._heartbeat)

    def _flush(self) -> None:
        sock = self._sock
        try:
            while sock is not None and self._out:
                first = self._out[0]
                sent = sock.send(first)
                self._held -= sent
                self._out[0] = first[sent:]
                if sent == len(first):
                    self._out.popleft()
        except BlockingIOError:
            self._loop.watch(sock.fileno(), WRITE, self._flush)  # type: ignore[union-attr]
        except OSError as error:
            # Told from the loop: whoever called send is in the middle of something.
            self._out.clear()
            self._held = 0
            reason = str(error)
            self._loop.call_later(0, lambda: self._lose(reason))
        else:
            if sock is not None:
                self._loop.unwatch(sock.fileno(), WRITE)
        self.on_held(self._held)

    def _readable(self) -> None:
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
            self._lose(f"it sent what is no frame of this protocol ({error})")

    def _deliver(self) -> None:
        """Hand on the messages that are complete. What was read goes in one piece: it is linear in small frames too."""
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
                    payload = seals[1].open(kind, payload)
                message = messages.parse(kind, payload, seals is not None)
                start = end
                if message != PING:
                    self.on_message(message)
        finally:
            del self._in[:start]


def nonce() -> str:
    return os.urandom(16).hex()


def fingerprint(hosts: Sequence[str]) -> str:
    """Two jobs with different hosts do not take each other for their own."""
    return hashlib.sha256("\n".join(hosts).encode()).hexdigest()


def proof(secret: str, role: str, transcript: Mapping[str, str]) -> str:
    """Return what only somebody with the job's secret can say of this handshake; `role`: no echo passes for it."""
    text = json.dumps([messages.VERSION, role, sorted(transcript.items())])
    return hmac.new(secret.encode("utf-8", "surrogateescape"), text.encode(), "sha256").hexdigest()


def seals(secret: str, role: str, transcript: Mapping[str, str]) -> tuple[Seal, Seal]:
    """Return the seal of `role` and that of the other side, for the connection of this handshake."""
    other = "worker" if role == "first" else "first"
    own, others = (Seal(bytes.fromhex(proof(secret, f"frames of {each}", transcript))) for each in (role, other))
    return own, others


def same(left: str, right: object) -> bool:
    """Compare proofs in constant time."""
    return isinstance(right, str) and hmac.compare_digest(left.encode(), right.encode())


def addresses(host: str, port: int) -> list[tuple[int, tuple[Any, ...]]]:
    """Return (family, address) of a host; raises OSError where the name is not known (yet)."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(family, address) for family, _, _, _, address in found]
