"""Measures the gzip size of a stream, in blocks on all cores. The compressed bytes are not kept.

The blocks are as in pigz: each is compressed by itself, with the end of the previous one as its dictionary. The sum
differs from the size of `gzip -6` by well under a percent, and is the same on every machine.
Why not a library: docs/decisions/written-by-hand.md.
"""

from __future__ import annotations

import os
import zlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate

LEVEL = 6
BLOCK = 128 * 1024  # bytes
_WINDOW = 32 * 1024  # bytes: how far back deflate looks
_FRAME = 18  # bytes: gzip's header and trailer
_MOST_PENDING = 64  # blocks; limits the memory


@dataclass(frozen=True)
class StreamSizes:
    """The sizes of a stream: its `bytes`, and in `ends` the compressed bytes up to the end of each block."""

    bytes: int
    ends: tuple[int, ...]

    @property
    def compressed(self) -> int:
        """The compressed bytes of the whole stream."""
        return self.compressed_before(self.bytes)

    def compressed_before(self, offset: int) -> int:
        """Returns the compressed bytes before an offset. Inside a block they count as evenly spread."""
        index, rest = divmod(min(offset, self.bytes), BLOCK)
        begin = self.ends[index - 1] if index else 0
        if not rest:
            return begin
        length = min(BLOCK, self.bytes - index * BLOCK)
        return begin + (self.ends[index] - begin) * rest // length


class DeflateMeter:
    """Measures a stream that is written in pieces. Meters may share a pool."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._buffer = bytearray()
        self._window = b""
        self._bytes = 0
        self._sizes: list[int] = []
        self._pending: deque[Future[int]] = deque()

    def write(self, data: bytes | memoryview) -> None:
        """Measures the next piece. Waits while too many blocks are pending."""
        self._bytes += len(data)
        self._buffer += data
        while len(self._buffer) > BLOCK:  # not >=: the last block must be known as the last
            self._submit(bytes(self._buffer[:BLOCK]), is_last=False)
            del self._buffer[:BLOCK]

    def finish(self) -> StreamSizes:
        """Waits for all blocks, and returns the sizes of all that was written.

        It is called once, after the last `write`.
        """
        if self._buffer:
            self._submit(bytes(self._buffer), is_last=True)
        self._sizes += [pending.result() for pending in self._pending]
        if self._sizes:
            self._sizes[-1] += _FRAME
        return StreamSizes(self._bytes, tuple(accumulate(self._sizes)))

    def _submit(self, block: bytes, *, is_last: bool) -> None:
        self._pending.append(self._pool.submit(_compressed, block, self._window, is_last))
        self._window = block[-_WINDOW:]
        while len(self._pending) > _MOST_PENDING:
            self._sizes.append(self._pending.popleft().result())


def make_pool() -> ThreadPoolExecutor:
    """Returns a pool with a thread for each core: zlib computes outside the interpreter's lock."""
    return ThreadPoolExecutor(len(os.sched_getaffinity(0)), "deflate")


def _compressed(block: bytes, window: bytes, is_last: bool) -> int:
    """Returns the number of bytes of a compressed block. Runs in a thread of the pool."""
    compressor = zlib.compressobj(LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS, zdict=window)
    size = len(compressor.compress(block))
    return size + len(compressor.flush(zlib.Z_FINISH if is_last else zlib.Z_SYNC_FLUSH))
