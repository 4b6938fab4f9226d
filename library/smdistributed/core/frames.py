"""Messages on a connection: a head, and any number of bodies, each as long as it says.

    8 bytes   how long the head is          covered by the tag, with the number of the message
    4 bytes   how many bodies there are     on this connection, from 0
    16 bytes  the tag: BLAKE2b with the connection's key
    8 bytes   for each body, how long it is  covered by the tag
    the head                                 covered by the tag
    the bodies                               not covered

Heads may be pickles, so that only one with a right tag is handed out: one that is changed, repeated, left out or moved
ends the connection. Bodies are numbers, which nobody executes; to check them would cost as much as to send them.
Inside a host nobody is between the two sides: tags are zero there, as to make them costs more than all else here.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Generator, Sequence

_PRELUDE = struct.Struct("!QI16s")
_COUNTED = struct.Struct("!QQI")
_TAG_BYTES = 16
_NO_TAG = bytes(_TAG_BYTES)
_READ_BYTES = 128 << 10  # to read on costs more than to copy so much
_UNPROVED_BYTES = 1 << 20

Message = tuple[bytes, "list[bytearray]"]


class FrameError(ConnectionError):
    """What came is no message of the other side, or not the next one."""


class Writer:
    """Makes the frames of one connection, in the order in which they are sent. key: empty: without tags."""

    def __init__(self, key: bytes) -> None:
        self._key, self._count = key, 0

    def frame(self, head: bytes, bodies: Sequence[memoryview]) -> bytes:
        """What goes before the bodies."""
        sizes = struct.pack(f"!{len(bodies)}Q", *[body.nbytes for body in bodies])
        rest = sizes + head
        tag = _tag(self._key, self._count, len(head), len(bodies), rest)
        self._count += 1
        return _PRELUDE.pack(len(head), len(bodies), tag) + rest


class Reader:
    """Makes messages of the bytes of one connection, however they are cut.

    Read into `buffer()`, tell `advance` how much came, and `take` what is complete, also after an error, before which
    it came. Long bodies are read to where they stay. key: the writer's.
    """

    def __init__(self, key: bytes) -> None:
        self._key, self._count = key, 0
        self._ahead = memoryview(bytearray(_READ_BYTES))
        self._complete: list[Message] = []
        self._parts = self._read_messages()
        self._part, self._filled = bytearray(next(self._parts)), 0

    @property
    def missing(self) -> int:
        """How many bytes the part that is being read still lacks."""
        return len(self._part) - self._filled

    def buffer(self) -> memoryview:
        """Where the next bytes go."""
        return memoryview(self._part)[self._filled :] if self.missing >= _READ_BYTES else self._ahead

    def advance(self, count: int) -> None:
        """So many bytes have come to `buffer()`. Raises FrameError if they are no message, or not the next one."""
        ahead = self._ahead
        if self.missing >= _READ_BYTES:
            ahead, self._filled = ahead[:0], self._filled + count
        taken = min(self.missing, len(ahead), count)
        self._part[self._filled : self._filled + taken] = ahead[:taken]
        self._filled += taken
        if not self.missing:
            self._go_on(self._part, ahead[taken:count])

    def _go_on(self, part: bytearray, ahead: memoryview) -> None:
        """A part is complete. Go on with what was read ahead."""
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

    def take(self) -> list[Message]:
        """The messages that have been completed since this was called last."""
        complete, self._complete = self._complete, []
        return complete

    def _read_messages(self) -> Generator[int, bytearray, None]:
        """Asks for parts of so many bytes, one after the other."""
        while True:
            head_bytes, bodies, tag = _PRELUDE.unpack((yield _PRELUDE.size))
            size = 8 * bodies + head_bytes
            rest = yield min(size, _UNPROVED_BYTES)
            while len(rest) < size:  # room is made for what has come: nobody has proved yet that the size is right
                rest += yield min(size - len(rest), _UNPROVED_BYTES)
            if not hmac.compare_digest(tag, _tag(self._key, self._count, head_bytes, bodies, rest)):
                raise FrameError("a message was changed on its way, or is not the next one")
            self._count += 1
            parts = []
            for size in struct.unpack_from(f"!{bodies}Q", rest):
                parts.append((yield size))
            self._complete.append((bytes(rest[8 * bodies :]), parts))


def _tag(key: bytes, number: int, head_bytes: int, bodies: int, rest: bytes | bytearray) -> bytes:
    if not key:
        return _NO_TAG
    mac = hashlib.blake2b(_COUNTED.pack(number, head_bytes, bodies), key=key, digest_size=_TAG_BYTES)
    mac.update(rest)
    return mac.digest()
