"""Reads an image as `docker save` writes it, once from begin to end, and keeps of each layer what its entries are.

Two layouts: a directory a layer with `layer.tar`, which may be a symlink to another's (engines before 25), and the OCI
layout with `blobs/sha256/`, whose layers may be compressed. `manifest.json` is in both, and comes last: so whatever
looks like a layer is read as one. No layer is held in memory.
"""

from __future__ import annotations

import gzip
import io
import json
import posixpath
import re
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import IO, Any, Literal, cast

from shoal.errors import ImageError
from shoal.layers import deflate

Kind = Literal["file", "directory", "symlink", "hardlink"]
WHITEOUT, OPAQUE = ".wh.", ".wh..wh..opq"
"""How the name of a whiteout begins, and the one that hides all that its directory has in the layers below."""

_AT_ONCE = 64 * 1024  # bytes of a read, and a multiple of 512; tarfile copies what is left of it for every header
_MOST_TEXT = 8 * 1024 * 1024  # bytes: a configuration or a manifest is much smaller
_NAMES_OF_PACKAGES = re.compile(r"var/lib/dpkg/(status|info/[^/]+\.list)|(.*/)?[^/]+\.dist-info/(METADATA|RECORD)")
_EXPECTED = "expected an image as docker save writes it: a tar archive with manifest.json and the layers that it names"
_OTHER_COMPRESSIONS = {b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of a layer's tar, which takes the bytes from `begin` to `end` of it, header and padding included."""

    path: str
    """Without a leading slash."""
    kind: Kind
    """What is none of the others is a file."""
    target: str
    """Where a link leads: a symlink's text, or the path of what a hard link shares."""
    begin: int
    end: int
    text: bytes | None
    """The content of a file that describes packages; None for all others."""

    @property
    def is_whiteout(self) -> bool:
        """Whether it says that something of the layers below is gone."""
        return posixpath.basename(self.path).startswith(WHITEOUT)


@dataclass(frozen=True)
class LayerTar:
    """A layer: its entries in the tar's order, its measure, and from the image's configuration its digest and command.

    Both are empty where the configuration does not say.
    """

    entries: tuple[Entry, ...]
    measured: deflate.Measured
    digest: str = ""
    command: str = ""


@dataclass
class _Members:
    """What the archive held, by its names, until manifest.json says what is what."""

    texts: dict[str, bytes] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    layers: dict[str, LayerTar] = field(default_factory=dict)
    compressions: dict[str, str] = field(default_factory=dict)
    """Of members that are compressed in a way that is not read."""


def read(name: str, chunks: Iterable[bytes]) -> tuple[LayerTar, ...]:
    """Return the layers, lowest first, of the image whose archive comes in `chunks`.

    Raises `ImageError`, naming `name`, for what is no archive of one image.
    """
    members = _Members()
    try:
        with deflate.pool() as pool, tarfile.open(fileobj=Chunks(chunks), mode="r|", bufsize=_AT_ONCE) as archive:
            for member in archive:
                _keep(archive, member, members, pool)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ImageError(f"{name}: not an image, or cut off ({error}); {_EXPECTED}.") from error
    return tuple(_layers(name, members))


class Chunks(io.RawIOBase):
    """A file that is read from an iterable of bytes."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks, self._rest = iter(chunks), memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            try:
                self._rest = memoryview(next(self._chunks))
            except StopIteration:
                return 0
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size


class _Metered(io.RawIOBase):
    """A file of which the meter gets all that is read."""

    def __init__(self, source: IO[bytes], meter: deflate.Meter) -> None:
        self._source, self._meter = source, meter

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._source.read(len(buffer))
        self._meter.write(data)
        buffer[: len(data)] = data
        return len(data)


def _keep(archive: tarfile.TarFile, member: tarfile.TarInfo, members: _Members, pool: ThreadPoolExecutor) -> None:
    name = plain(member.name)
    if member.issym() or member.islnk():
        beside = posixpath.dirname(name) if member.issym() else ""
        members.links[name] = plain(posixpath.join(beside, member.linkname))
        return
    content = archive.extractfile(member) if member.isfile() else None
    if content is None:
        return
    buffered = cast(io.BufferedReader, content)
    begin = buffered.peek(512)[:512]
    if begin[:2] == b"\x1f\x8b":
        with gzip.open(buffered) as unpacked:
            members.layers[name] = _layer(cast(IO[bytes], unpacked), pool)
    elif _is_tar(begin):
        members.layers[name] = _layer(buffered, pool)
    elif found := [word for magic, word in _OTHER_COMPRESSIONS.items() if begin.startswith(magic)]:
        members.compressions[name] = found[0]
    elif member.size <= _MOST_TEXT and begin[:1] in (b"{", b"["):
        members.texts[name] = buffered.read()


def _is_tar(begin: bytes) -> bool:
    return begin[257:262] == b"ustar" or (len(begin) == 512 and not any(begin))


def _layer(content: IO[bytes], pool: ThreadPoolExecutor) -> LayerTar:
    meter = deflate.Meter(pool)
    source = _Metered(content, meter)
    with tarfile.open(fileobj=source, mode="r|", bufsize=_AT_ONCE) as archive:
        entries = tuple(_entries(archive))
    while source.read(_AT_ONCE):
        pass  # the padding after the archive's end is part of its size
    return LayerTar(entries, meter.finish())


def _entries(archive: tarfile.TarFile) -> Iterator[Entry]:
    begin = 0
    while (member := archive.next()) is not None:
        archive.members = []  # type: ignore[attr-defined]  # it would keep them all
        path = plain(member.name)
        text = None
        if member.isfile() and _NAMES_OF_PACKAGES.fullmatch(path):
            content = archive.extractfile(member)
            text = content.read() if content else None
        target = member.linkname if member.issym() else plain(member.linkname) if member.islnk() else ""
        yield Entry(path, kind(member), target, begin, archive.offset, text)
        begin = archive.offset


def kind(member: tarfile.TarInfo) -> Kind:
    """Return what an entry of a tar is; what is none of the others is a file."""
    if member.isdir():
        return "directory"
    if member.issym():
        return "symlink"
    return "hardlink" if member.islnk() else "file"


def readable(text: str) -> str:
    """Return a text that can be written as UTF-8: what cannot (a path's bytes, say) becomes question marks."""
    return text.encode("utf-8", "replace").decode()


def plain(path: str) -> str:
    """Return a path of a tar in its shortest form, without a leading slash; `.` is the root."""
    return posixpath.normpath(path).lstrip("/")


def _layers(name: str, members: _Members) -> Iterator[LayerTar]:
    """Yield the layers that manifest.json names."""
    image = _manifest(name, members)
    paths = _texts(name, "Layers in manifest.json", image.get("Layers"))
    config = _json(name, members, plain(str(image.get("Config", ""))))
    digests, commands = _told(config if isinstance(config, dict) else {}, len(paths))
    for path, digest, command in zip(paths, digests, commands, strict=True):
        found = _follow(plain(path), members.links)
        if found in members.compressions:
            raise ImageError(f"{name}: its layer {path} is compressed by {members.compressions[found]}; gzip is read.")
        if found not in members.layers:
            raise ImageError(f"{name}: manifest.json names the layer {path}, which is not in it as a tar; {_EXPECTED}.")
        layer = members.layers[found]
        yield LayerTar(layer.entries, layer.measured, digest, command)


def _manifest(name: str, members: _Members) -> Mapping[str, Any]:
    images = _json(name, members, "manifest.json")
    if not isinstance(images, list) or not images or not all(isinstance(image, dict) for image in images):
        raise ImageError(f"{name}: its manifest.json is no list of images; {_EXPECTED}.")
    if len(images) > 1:
        tags = [tag for image in images for tag in image.get("RepoTags") or ()]
        raise ImageError(f"{name}: {len(images)} images in it ({', '.join(tags)}). Save one: docker save -o FILE TAG")
    image: Mapping[str, Any] = images[0]
    return image


def _json(name: str, members: _Members, path: str) -> object:
    text = members.texts.get(_follow(path, members.links))
    if text is None:
        raise ImageError(f"{name}: no {path} in it; {_EXPECTED}.")
    try:
        document: object = json.loads(text)
    except ValueError as error:
        raise ImageError(f"{name}: its {path} is not JSON ({error}); {_EXPECTED}.") from error
    return document


def _texts(name: str, what: str, value: object) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ImageError(f"{name}: {what}: {value!r} is no list of names; {_EXPECTED}.")
    return value


def _told(config: Mapping[str, Any], layers: int) -> tuple[list[str], list[str]]:
    """Return the digest and the command of each layer; where the numbers do not agree, empty ones."""
    digests = [str(digest) for digest in (config.get("rootfs") or {}).get("diff_ids") or []]
    history = [step for step in config.get("history") or [] if not step.get("empty_layer")]
    commands = [readable(str(step.get("created_by", ""))) for step in history]
    unknown = [""] * layers
    return digests if len(digests) == layers else unknown, commands if len(commands) == layers else unknown


def _follow(path: str, links: Mapping[str, str]) -> str:
    for _ in links:
        if path not in links:
            break
        path = links[path]
    return path
