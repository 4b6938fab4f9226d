"""Compresses the layers of an image in Docker into files, as a registry gets them.

Docker itself pushes gzip. This module writes zstd, or gzip that a reader can enter at many places. For that, each span
of 4 MiB is compressed without the bytes before it. The uncompressed layers and the configuration stay as they are, and
with them the image's ID. Why: docs/decisions/push-formats.md.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import tarfile
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, cast

from shoal.docker_client.archive import Chunks, is_tar, open_stream
from shoal.errors import ImageError
from shoal.limits import MIB, MOST_LAYERS

if TYPE_CHECKING:
    from backports import zstd

Compression = Literal["gzip", "zstd"]
SPAN = 4 * MIB
"""Uncompressed bytes between two places where a reader can enter a gzip layer."""

_LAYER = "application/vnd.oci.image.layer.v1.tar+"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_GZIP_LEVEL = 6
_ZSTD_LEVEL = 9
_AT_ONCE = MIB  # bytes of a read, a multiple of 512
_MOST_TEXT = 8 * MIB
_MOST_PENDING = 16  # spans; limits the memory
_GZIP_HEADER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"


@dataclass(frozen=True)
class Blob:
    """Content for a registry: bytes, or a file."""

    digest: str
    size: int
    media_type: str
    content: bytes | Path
    annotations: Mapping[str, str] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        """Returns the descriptor of the blob, as manifests have it.

        Clients of SOCI write an index again and compare its digest. So fields and annotations have the order of Go.
        """
        found: dict[str, Any] = {"mediaType": self.media_type, "digest": self.digest, "size": self.size}
        return found | ({"annotations": dict(sorted(self.annotations.items()))} if self.annotations else {})


@dataclass(frozen=True)
class Span:
    """A part of a gzip layer that is read by itself. Offsets are in bytes of the file and of the tar."""

    compressed: int
    uncompressed: int
    digest: str
    """Of the compressed bytes up to the next span, or to the end of the file."""


@dataclass(frozen=True)
class Layer:
    """A compressed layer. `spans` and `entries` are empty unless they were asked for."""

    diff_id: str
    blob: Blob
    uncompressed: int
    """Bytes of the layer's tar."""
    spans: tuple[Span, ...] = ()
    entries: tuple[tarfile.TarInfo, ...] = ()


@dataclass(frozen=True)
class Packed:
    """The configuration and the layers of an image, lowest first."""

    config: Blob
    layers: tuple[Layer, ...]


def make_blob(content: bytes, media_type: str, annotations: Mapping[str, str] | None = None) -> Blob:
    """Returns a blob of these bytes."""
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    return Blob(digest, len(content), media_type, content, annotations or {})


def pack_image(
    tag: str, chunks: Iterable[bytes], directory: Path, compression: Compression, *, with_entries: bool
) -> Packed:
    """Compresses the layers of an image on all cores, into files in a directory.

    Args:
        tag: The image, for messages.
        chunks: The archive that `docker save` writes, which is read once.
        with_entries: Whether to list the spans and entries of each layer.

    Raises:
        ImageError: If it is not an archive of one image, with all its layers.
    """
    texts: dict[str, bytes] = {}
    layers: dict[str, Layer] = {}
    try:
        with _make_pool() as pool, open_stream(cast(IO[bytes], Chunks(chunks)), _AT_ONCE) as archive:
            for number, member in enumerate(archive):
                content = archive.extractfile(member) if member.isfile() else None
                if content is None or len(layers) > MOST_LAYERS:
                    continue
                if source := _open_layer(cast(io.BufferedReader, content)):
                    path = directory / str(number)
                    layer = _compress(source, path, compression, pool, with_entries)
                    if layers.setdefault(layer.diff_id, layer) is not layer:  # an image can have a layer twice
                        path.unlink()
                elif member.size <= _MOST_TEXT:
                    texts[member.name] = content.read()
        return _arrange(texts, layers)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, LookupError, ValueError) as error:
        raise ImageError(f"{tag}: Docker's archive of it cannot be read: {error}. Fix: push again") from error


def _arrange(texts: Mapping[str, bytes], layers: Mapping[str, Layer]) -> Packed:
    """Raises LookupError or ValueError if the archive does not have exactly one image with all its layers."""
    (image,) = json.loads(texts["manifest.json"])
    content = texts[image["Config"]]
    diff_ids = json.loads(content)["rootfs"]["diff_ids"]
    return Packed(make_blob(content, _CONFIG), tuple(layers[diff_id] for diff_id in diff_ids))


def _make_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(len(os.sched_getaffinity(0)), "compress")


def _open_layer(content: io.BufferedReader) -> IO[bytes] | None:
    """Returns the tar of a layer, which Docker may have stored compressed; None for other content."""
    begin = content.peek(512)[:512]
    if begin[:2] == b"\x1f\x8b":
        return cast(IO[bytes], gzip.open(content))
    if begin[:4] == b"\x28\xb5\x2f\xfd":
        from backports import zstd  # only commands that need it load it

        return cast(IO[bytes], zstd.open(content))
    return content if is_tar(begin) else None


class _Copier(io.RawIOBase):
    """A readable file that passes all that is read to a writer."""

    def __init__(self, source: IO[bytes], writer: _Writer) -> None:
        self._source, self._writer = source, writer

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._source.read(len(buffer))
        self._writer.write(data)
        buffer[: len(data)] = data
        return len(data)


class _Writer:
    """Compresses what is written into a file, and computes the digests of both."""

    def __init__(self, file: IO[bytes], compression: Compression, pool: ThreadPoolExecutor) -> None:
        self._file, self._pool = file, pool
        self._tar, self._whole = hashlib.sha256(), hashlib.sha256()
        self.uncompressed = self.compressed = 0
        self.spans: list[Span] = []
        self._buffer = bytearray()
        self._pending: deque[Future[bytes]] = deque()
        self._crc = 0
        self._zstd = _make_zstd() if compression == "zstd" else None
        if self._zstd is None:
            self._emit(_GZIP_HEADER)

    def write(self, data: bytes) -> None:
        """Compresses the next piece."""
        self._tar.update(data)
        self.uncompressed += len(data)
        if self._zstd:
            self._emit(self._zstd.compress(data))
            return
        self._crc = zlib.crc32(data, self._crc)
        self._buffer += data
        while len(self._buffer) > SPAN:  # not >=: the last span must be known as the last
            self._submit(bytes(self._buffer[:SPAN]), is_last=False)
            del self._buffer[:SPAN]

    def finish(self, path: Path, compression: Compression, entries: Iterable[tarfile.TarInfo] = ()) -> Layer:
        """Writes the rest, and returns the layer."""
        if self._zstd:
            self._emit(self._zstd.flush())
        else:
            self._submit(bytes(self._buffer), is_last=True)
            trailer = self._crc.to_bytes(4, "little") + (self.uncompressed % 2**32).to_bytes(4, "little")
            self._drain(0, trailer)
        blob = Blob(f"sha256:{self._whole.hexdigest()}", self.compressed, _LAYER + compression, path)
        diff_id = f"sha256:{self._tar.hexdigest()}"
        return Layer(diff_id, blob, self.uncompressed, tuple(self.spans), tuple(entries))

    def _submit(self, span: bytes, *, is_last: bool) -> None:
        self._pending.append(self._pool.submit(_deflate, span, is_last))
        self._drain(_MOST_PENDING)

    def _drain(self, most: int, trailer: bytes = b"") -> None:
        """Writes the oldest spans until at most `most` are pending. The last one gets the trailer."""
        while len(self._pending) > most:
            data = self._pending.popleft().result()
            if not self._pending:
                data += trailer
            begin = self.spans[-1].uncompressed + SPAN if self.spans else 0
            self.spans.append(Span(self.compressed, begin, f"sha256:{hashlib.sha256(data).hexdigest()}"))
            self._emit(data)

    def _emit(self, data: bytes) -> None:
        self._whole.update(data)
        self._file.write(data)
        self.compressed += len(data)


def _compress(
    source: IO[bytes], path: Path, compression: Compression, pool: ThreadPoolExecutor, with_entries: bool
) -> Layer:
    """Compresses a layer's tar into a file."""
    with path.open("wb") as file:
        writer = _Writer(file, compression, pool)
        copier = _Copier(source, writer)
        entries = list(_read_entries(copier)) if with_entries else []
        while copier.read(_AT_ONCE):
            pass  # also what follows the last entry
        return writer.finish(path, compression, entries)


def _read_entries(source: io.RawIOBase) -> Iterator[tarfile.TarInfo]:
    with open_stream(cast(IO[bytes], source), _AT_ONCE) as archive:
        while (member := archive.next()) is not None:
            archive.members = []  # type: ignore[attr-defined]  # tarfile would keep them all
            yield member


def _make_zstd() -> zstd.ZstdCompressor:
    """Compresses on all cores. The output does not depend on their number."""
    from backports import zstd

    names = zstd.CompressionParameter
    workers = max(1, len(os.sched_getaffinity(0)))  # with 0, it would be another format of blocks
    return zstd.ZstdCompressor(
        options={names.compression_level: _ZSTD_LEVEL, names.nb_workers: workers, names.checksum_flag: 1}
    )


def _deflate(span: bytes, is_last: bool) -> bytes:
    """Returns the compressed span, which refers to no byte before it. Runs in a thread of the pool."""
    compressor = zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    return compressor.compress(span) + compressor.flush(zlib.Z_FINISH if is_last else zlib.Z_FULL_FLUSH)
