"""Messages on a connection: a head, and any number of bodies.

    8 bytes   length of the head             covered by the tag, with the number of the message
    4 bytes   number of bodies               on this connection, from 0
    16 bytes  the tag: BLAKE2b with the connection's key
    8 bytes   length of each body            covered by the tag
    the head                                 covered by the tag
    the bodies                               not covered

The transport's heads may be pickles, so only heads with a valid tag are delivered. A message that is changed, repeated,
left out or moved ends the connection. Bodies are numbers, which are not executed; a tag over them would cost as much as
sending them. Within a host, the transport's messages can't be changed: tags are zero there, because they cost more than
all the rest. The store has no bodies, and always tags.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import struct
from collections.abc import Generator, Sequence

_PRELUDE = struct.Struct("!QI16s")
_COUNTED = struct.Struct("!QQI")
_TAG_BYTES = 16
_NO_TAG = bytes(_TAG_BYTES)
_READ_BYTES = 128 << 10  # another read costs more than a copy of so much
_UNVERIFIED_BYTES = 1 << 20

Frame = tuple[bytes, "list[bytearray]"]


class FrameError(ConnectionError):
    """The bytes are not the next message of the other side."""


class FrameWriter:
    """Makes the frames of one connection, in the order in which they are sent. An empty key means no tags."""

    def __init__(self, key: bytes) -> None:
        self._key, self._count = key, 0

    def frame(self, head: bytes, bodies: Sequence[memoryview]) -> bytes:
        """Returns the bytes that go before the bodies. Counts the message: the tag covers its number."""
        sizes = struct.pack(f"!{len(bodies)}Q", *[body.nbytes for body in bodies])
        rest = sizes + head
        tag = _tag(self._key, self._count, len(head), len(bodies), rest)
        self._count += 1
        return _PRELUDE.pack(len(head), len(bodies), tag) + rest


class FrameReader:
    """Makes messages from the bytes of one connection, which arrive in pieces of any size.

    Read into `buffer()`, pass the number of bytes to `advance`, and `take` the complete messages. `take` also returns
    the messages before an error. Long bodies are read without a copy. key: the writer's key. most: the bytes of the
    longest message. ahead: shorter parts are read together, up to that many bytes.
    """

    def __init__(self, key: bytes, most: float = math.inf, ahead: int = _READ_BYTES) -> None:
        self._key, self._count, self._most = key, 0, most
        self._ahead = memoryview(bytearray(ahead))
        self._complete: list[Frame] = []
        self._parts = self._read_messages()
        self._part, self._filled = bytearray(next(self._parts)), 0

    @property
    def missing(self) -> int:
        """How many bytes the part that is being read still lacks."""
        return len(self._part) - self._filled

    def buffer(self) -> memoryview:
        return memoryview(self._part)[self._filled :] if self.missing >= len(self._ahead) else self._ahead

    def advance(self, count: int) -> None:
        """Takes `count` bytes that were read into `buffer()`. Raises FrameError if they are not the next message."""
        ahead = self._ahead
        if self.missing >= len(ahead):
            ahead, self._filled = ahead[:0], self._filled + count
        taken = min(self.missing, len(ahead), count)
        self._part[self._filled : self._filled + taken] = ahead[:taken]
        self._filled += taken
        if not self.missing:
            self._finish_parts(self._part, ahead[taken:count])

    def _finish_parts(self, part: bytearray, ahead: memoryview) -> None:
        """Raises FrameError if a tag is wrong, or there is no memory for the next part."""
        at = 0
        while True:
            size = self._parts.send(part)
            end = at + size
            if end > len(ahead):
                break
            part, at = bytearray(ahead[at:end]), end
        try:
            self._part, self._filled = bytearray(size), len(ahead) - at
        except (MemoryError, OverflowError):
            raise FrameError(f"there is no memory for a message of {size} bytes") from None
        self._part[: self._filled] = ahead[at:]

    def take(self) -> list[Frame]:
        complete, self._complete = self._complete, []
        return complete

    def _read_messages(self) -> Generator[int, bytearray, None]:
        """Yields the size of the next part that it needs, and is sent the part. Raises FrameError."""
        while True:
            head_bytes, bodies, tag = _PRELUDE.unpack((yield _PRELUDE.size))
            size = 8 * bodies + head_bytes
            self._check_size(size)
            rest = yield min(size, _UNVERIFIED_BYTES)
            while len(rest) < size:  # in steps: the size is not verified yet
                rest += yield min(size - len(rest), _UNVERIFIED_BYTES)
            if not hmac.compare_digest(tag, _tag(self._key, self._count, head_bytes, bodies, rest)):
                raise FrameError("a message was changed on its way, or is not the next one")
            self._count += 1
            sizes = struct.unpack_from(f"!{bodies}Q", rest)
            self._check_size(size + sum(sizes))
            parts = []
            for size in sizes:
                parts.append((yield size))
            self._complete.append((bytes(rest[8 * bodies :]), parts))

    def _check_size(self, size: int) -> None:
        if size > self._most:
            raise FrameError(f"a message of {size} bytes")


def _tag(key: bytes, number: int, head_bytes: int, bodies: int, rest: bytes | bytearray) -> bytes:
    if not key:
        return _NO_TAG
    mac = hashlib.blake2b(_COUNTED.pack(number, head_bytes, bodies), key=key, digest_size=_TAG_BYTES)
    mac.update(rest)
    return mac.digest()
