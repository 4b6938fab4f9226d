"""Reads the archive that `docker save` writes, once from begin to end, and keeps the list of entries of each layer.

There are two layouts. Docker before 25 writes a directory for each layer with a `layer.tar`, which may be a symlink to
another's. The OCI layout has `blobs/sha256/`, with layers that may be compressed. Both have `manifest.json` at the end.
So everything that looks like a layer is read as one. No layer is held in memory.
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

from shoal.docker_client.archive import Chunks, is_tar, open_stream
from shoal.errors import ImageError
from shoal.image import deflate
from shoal.limits import MOST_LAYER, MOST_LAYER_ENTRIES, MOST_LAYER_TEXT, MOST_LAYERS, MOST_PATH

Kind = Literal["file", "directory", "symlink", "hardlink"]
WHITEOUT, OPAQUE = ".wh.", ".wh..wh..opq"
"""The prefix of a whiteout, and the name of one that hides all that lower layers have in its directory."""

_AT_ONCE = 64 * 1024  # bytes of a read, a multiple of 512; tarfile copies the rest of it for every header
_SHOWN_TAGS = 10
_MOST_TEXT = 8 * 1024 * 1024  # bytes: a configuration or a manifest is much smaller
_BLOB = re.compile(r"blobs/sha256/[0-9a-f]{64}")
_PACKAGE_FILES = re.compile(r"var/lib/dpkg/(status|info/[^/]+\.list)|(.*/)?[^/]+\.dist-info/(METADATA|RECORD)")
"""The files that describe packages."""
_EXPECTED = (
    "expected an image as docker save writes it: a tar archive with manifest.json and the layers that it names."
    " Fix: write it again: docker save -o FILE TAG"
)
_OTHER_COMPRESSIONS = {b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of a layer's tar: its bytes from `begin` to `end`, with header and padding."""

    path: str
    """Without a leading slash."""
    kind: Kind
    """Devices and the like count as files."""
    target: str
    """The text of a symlink, or the path that a hard link shares."""
    begin: int
    end: int
    text: bytes | None
    """The content of a file that describes packages; else None."""

    @property
    def is_whiteout(self) -> bool:
        """Whether it removes something of the layers below."""
        return posixpath.basename(self.path).startswith(WHITEOUT)


@dataclass(frozen=True)
class LayerTar:
    """A layer: its entries in the tar's order and its compressed size.

    Digest and command are from the image's configuration; empty if that has none.
    """

    entries: tuple[Entry, ...]
    measured: deflate.StreamSizes
    digest: str = ""
    command: str = ""


Blobs = dict[str, LayerTar]
"""Layers by the names of their files in the OCI layout, which have the digests of their contents."""


@dataclass
class _Members:
    """The members of the archive by name, until manifest.json tells what they are."""

    texts: dict[str, bytes] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    layers: dict[str, LayerTar] = field(default_factory=dict)
    compressions: dict[str, str] = field(default_factory=dict)
    """The compressions of members that cannot be read."""
    budget: Budget = field(default_factory=lambda: Budget())
    known: Blobs | None = None


def read_layers(name: str, chunks: Iterable[bytes], known: Blobs | None = None) -> tuple[LayerTar, ...]:
    """Returns the layers of an image, lowest first, from its archive.

    Args:
        name: The image, for messages.
        known: Layers of other archives, which are not read again. New ones are added. Only for archives of Docker: in
            others, a name may be wrong.

    Raises:
        ImageError: With `name`, if it is not an archive of one image.
    """
    members = _Members(known=known)
    try:
        with deflate.make_pool() as pool, open_stream(cast(IO[bytes], Chunks(chunks)), _AT_ONCE) as archive:
            for member in archive:
                _keep(archive, member, members, pool)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, RecursionError, ValueError) as error:
        raise ImageError(f"{name}: not an image, or cut off ({error}); {_EXPECTED}") from error
    except ImageError as error:
        raise ImageError(f"{name}: {error}") from error
    return tuple(_layers(name, members))


class Budget:
    """What is left of the limits for an image, over all its layers. Raises `ImageError` if it is used up."""

    def __init__(self) -> None:
        self._left = {
            "unpacked bytes": MOST_LAYER,
            "entries": MOST_LAYER_ENTRIES,
            "bytes of files that describe packages, and of names,": MOST_LAYER_TEXT,
        }

    def take(self, bytes_: int = 0, entries: int = 0, text: int = 0) -> None:
        """Counts something that was read, or will be."""
        for (name, left), size in zip(self._left.items(), (bytes_, entries, text)):
            self._left[name] = left - size
            if left < size:
                raise ImageError(f"its layers have more {name} than Shoal reads. Fix: do not trust this image")


class _Metered(io.RawIOBase):
    """A readable file that passes all that is read to a meter, and counts it."""

    def __init__(self, source: IO[bytes], meter: deflate.DeflateMeter, budget: Budget) -> None:
        self._source, self._meter, self._budget = source, meter, budget

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._source.read(len(buffer))
        self._budget.take(bytes_=len(data))
        self._meter.write(data)
        buffer[: len(data)] = data
        return len(data)


def _keep(archive: tarfile.TarFile, member: tarfile.TarInfo, members: _Members, pool: ThreadPoolExecutor) -> None:
    """Layers are unpacked if needed, and compressed in `pool` to measure them. JSON of more than 8 MiB is skipped."""
    name = normalize_path(member.name)
    members.budget.take(entries=1)
    if member.issym() or member.islnk():
        beside = posixpath.dirname(name) if member.issym() else ""
        members.links[name] = normalize_path(posixpath.join(beside, member.linkname))
        return
    known = {} if members.known is None or not _BLOB.fullmatch(name) else members.known
    if name in known:
        members.layers[name] = known[name]
        return
    content = archive.extractfile(member) if member.isfile() else None
    if content is None:
        return
    buffered = cast(io.BufferedReader, content)
    begin = buffered.peek(512)[:512]
    if begin[:2] == b"\x1f\x8b":
        with gzip.open(buffered) as unpacked:
            members.layers[name] = known[name] = _layer(cast(IO[bytes], unpacked), pool, members.budget)
    elif is_tar(begin):
        members.layers[name] = known[name] = _layer(buffered, pool, members.budget)
    elif found := [word for magic, word in _OTHER_COMPRESSIONS.items() if begin.startswith(magic)]:
        members.compressions[name] = found[0]
    elif member.size <= _MOST_TEXT and begin[:1] in (b"{", b"["):
        members.budget.take(text=member.size)
        members.texts[name] = buffered.read()


def _layer(content: IO[bytes], pool: ThreadPoolExecutor, budget: Budget) -> LayerTar:
    """Reads a layer to its end, and returns its entries and sizes. Digest and command are still empty."""
    meter = deflate.DeflateMeter(pool)
    source = _Metered(content, meter, budget)
    with open_stream(cast(IO[bytes], source), _AT_ONCE) as archive:
        entries = tuple(entry for _, entry, _ in read_entries(archive, budget))
    while source.read(_AT_ONCE):
        pass  # the padding after the archive's end is part of its size
    return LayerTar(entries, meter.finish())


def read_entries(archive: tarfile.TarFile, budget: Budget) -> Iterator[tuple[tarfile.TarInfo, Entry, IO[bytes] | None]]:
    """Yields the entries of a layer or of an exported container, with their headers and contents.

    The content is None unless it is a file. The entry of a file about packages has its content already.
    """
    begin = 0
    while (member := archive.next()) is not None:
        archive.members = []  # type: ignore[attr-defined]  # tarfile would keep them all
        path = normalize_path(member.name)
        budget.take(entries=1, text=len(path) + len(member.linkname))
        content = archive.extractfile(member) if member.isfile() else None
        text = None
        if content and _PACKAGE_FILES.fullmatch(path):
            budget.take(text=member.size)
            text = content.read()
        target = member.linkname if member.issym() else normalize_path(member.linkname) if member.islnk() else ""
        yield member, Entry(path, _kind_of(member), target, begin, archive.offset, text), content
        begin = archive.offset


def _kind_of(member: tarfile.TarInfo) -> Kind:
    if member.isdir():
        return "directory"
    if member.issym():
        return "symlink"
    return "hardlink" if member.islnk() else "file"


def replace_surrogates(text: str) -> str:
    """Returns a text that can be encoded as UTF-8: other bytes of a path become question marks."""
    return text.encode("utf-8", "replace").decode()


def normalize_path(path: str) -> str:
    """Returns the shortest form of a path in a tar, without a leading slash. `.` is the root.

    Raises `ImageError` if it is too long: all directories above it are held in memory.
    """
    if len(path) > MOST_PATH:
        raise ImageError(f"a path of {len(path):,} characters in it. Fix: do not trust this image")
    return posixpath.normpath(path).lstrip("/")


def _layers(name: str, members: _Members) -> Iterator[LayerTar]:
    image = _manifest(name, members)
    paths = _texts(name, "Layers in manifest.json", image.get("Layers"))
    if len(paths) > MOST_LAYERS:
        raise ImageError(f"{name}: {len(paths):,} layers, and Docker allows 127. Fix: do not trust this image")
    config = _json(name, members, normalize_path(str(image.get("Config", ""))))
    digests, commands = _describe_layers(config if isinstance(config, dict) else {}, len(paths))
    for path, digest, command in zip(paths, digests, commands, strict=True):
        found = _follow(normalize_path(path), members.links)
        if found in members.compressions:
            raise ImageError(
                f"{name}: its layer {path} is compressed by {members.compressions[found]}. Allowed: gzip, or none. Fix:"
                " docker load it, and docker save it again"
            )
        if found not in members.layers:
            raise ImageError(f"{name}: manifest.json names the layer {path}, which is not in it as a tar; {_EXPECTED}")
        layer = members.layers[found]
        yield LayerTar(layer.entries, layer.measured, digest, command)


def _manifest(name: str, members: _Members) -> Mapping[str, Any]:
    images = _json(name, members, "manifest.json")
    if not isinstance(images, list) or not images or not all(isinstance(image, dict) for image in images):
        raise ImageError(f"{name}: its manifest.json is no list of images; {_EXPECTED}")
    if len(images) > 1:
        tags = [str(tag) for image in images for tag in _as_list(image.get("RepoTags"))]
        raise ImageError(
            f"{name}: {len(images)} images in it ({', '.join(tags[:_SHOWN_TAGS])}). Fix: save one: docker save -o FILE"
            " TAG"
        )
    image: Mapping[str, Any] = images[0]
    return image


def _json(name: str, members: _Members, path: str) -> object:
    text = members.texts.get(_follow(path, members.links))
    if text is None:
        raise ImageError(f"{name}: no {path} in it; {_EXPECTED}")
    try:
        document: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ImageError(f"{name}: its {path} is not JSON ({error}); {_EXPECTED}") from error
    return document


def _texts(name: str, what: str, value: object) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ImageError(f"{name}: {what} is not a list of names: {value!r}; {_EXPECTED}")
    return value


def _describe_layers(config: Mapping[str, Any], layers: int) -> tuple[list[str], list[str]]:
    """All digests are empty if the configuration has another number than `layers`. The same holds for the commands."""
    root = config.get("rootfs")
    digests = [str(digest) for digest in _as_list(root.get("diff_ids") if isinstance(root, dict) else None)]
    steps = [step if isinstance(step, dict) else {} for step in _as_list(config.get("history"))]
    history = [step for step in steps if not step.get("empty_layer")]
    commands = [replace_surrogates(str(step.get("created_by", ""))) for step in history]
    unknown = [""] * layers
    return digests if len(digests) == layers else unknown, commands if len(commands) == layers else unknown


def _as_list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _follow(path: str, links: Mapping[str, str]) -> str:
    for _ in links:  # not longer: links may form a circle
        if path not in links:
            break
        path = links[path]
    return path
