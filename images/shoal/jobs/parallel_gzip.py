"""Compresses a stream on all cores, as pigz does: the blocks are one gzip stream, which every program reads.

zlib compresses without Python's lock. Blocks of 1 MiB have no dictionary, which costs
less than a thousandth of the size.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import IO

_LEVEL = 6
_BLOCK = 1 << 20  # bytes
_HEADER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"  # RFC 1952: deflate, without a name and a time
_EMPTY_END = b"\x03\x00"  # RFC 1951: a last block without content
_RAW = -15  # of zlib: no header of its own


class ParallelGzip:
    """A file-like object for writing. Use it as a context manager; after an error the stream stays without its end."""

    def __init__(self, out: IO[bytes], workers: int | None = None) -> None:
        self._out = out
        count = workers or len(os.sched_getaffinity(0))
        self._pool = ThreadPoolExecutor(count)
        self._most_pending = 2 * count  # blocks; limits the memory
        self._pending: deque[Future[bytes]] = deque()
        self._buffer = bytearray()
        self._size = self._sum = 0
        out.write(_HEADER)

    def __enter__(self) -> ParallelGzip:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._pool.shutdown(cancel_futures=True)

    def tell(self) -> int:
        """Returns the number of bytes that were written, before their compression."""
        return self._size

    def write(self, data: bytes) -> int:
        """Compresses more bytes. Waits while too many blocks are pending."""
        self._size += len(data)
        self._sum = zlib.crc32(data, self._sum)
        self._buffer += data
        while len(self._buffer) >= _BLOCK:
            self._submit(bytes(self._buffer[:_BLOCK]))
            del self._buffer[:_BLOCK]
        return len(data)

    def _submit(self, block: bytes) -> None:
        self._pending.append(self._pool.submit(_compress, block))
        while len(self._pending) > self._most_pending:
            self._out.write(self._pending.popleft().result())

    def _finish(self) -> None:
        self._submit(bytes(self._buffer))
        for block in self._pending:
            self._out.write(block.result())
        self._out.write(_EMPTY_END + struct.pack("<II", self._sum, self._size & 0xFFFFFFFF))


def _compress(block: bytes) -> bytes:
    """Returns blocks of deflate that end at a whole byte, so that others can follow."""
    compressor = zlib.compressobj(_LEVEL, zlib.DEFLATED, _RAW)
    return compressor.compress(block) + compressor.flush(zlib.Z_SYNC_FLUSH)
