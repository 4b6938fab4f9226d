"""Makes a SOCI index of an image, with which clients start containers before the image is there.

A client that knows SOCI mounts each layer with its table of contents (zTOC), and fetches only the spans that are read.
The format is SOCI index manifest v2 with zTOC 0.9 of https://github.com/awslabs/soci-snapshotter, as `soci convert`
writes it. Other clients take the image from the same index, and see no difference.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from shoal.builds.layers import SPAN, Blob, Layer, Packed, Span, make_blob
from shoal.limits import MIB

LEAST_LAYER = 10 * MIB
"""Compressed bytes. Smaller layers get no table: a client fetches them whole, which takes fewer requests."""

INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_SOCI = "application/vnd.amazon.soci.index.v2+json"
_NAMES = "com.amazon.soci."
_VERSION, _BUILDER = "0.9", "shoal"
_WINDOW = bytes(32 * 1024)
"""The bytes before a span. It does not refer to them, so zeros stand for them."""
_TYPES = {
    tarfile.REGTYPE: "reg",
    tarfile.AREGTYPE: "reg",
    tarfile.LNKTYPE: "hardlink",
    tarfile.SYMTYPE: "symlink",
    tarfile.DIRTYPE: "dir",
    tarfile.CHRTYPE: "char",
    tarfile.BLKTYPE: "block",
    tarfile.FIFOTYPE: "fifo",
}
_GZIP = 1
_OPAQUE = ".wh..wh..opq"


@dataclass(frozen=True)
class Publication:
    """The content for a registry, in this order: blobs, then manifests by digest, and the one with the tag."""

    blobs: tuple[Blob, ...]
    manifests: tuple[Blob, ...]
    tagged: Blob


def publish_plain(packed: Packed) -> Publication:
    """Returns an image without an index."""
    blobs = (*(layer.blob for layer in packed.layers), packed.config)
    return Publication(blobs, (), _make_document(_describe_image(packed), MANIFEST))


def publish_lazy(packed: Packed) -> Publication:
    """Returns an image and its SOCI index, in an OCI index. Without a layer of 10 MiB, it is the image alone."""
    large = [layer for layer in packed.layers if layer.blob.size >= LEAST_LAYER and _is_readable(layer)]
    if not large:
        return publish_plain(packed)
    tables = [_make_table(layer) for layer in large]
    empty = make_blob(b"{}", _SOCI)
    soci = _make_document(_manifest(empty, tables, {f"{_NAMES}build-tool-identifier": _BUILDER}), MANIFEST)
    note = {f"{_NAMES}index-digest": soci.digest}
    image = _make_document(_describe_image(packed, note), MANIFEST)
    platform = {"platform": _read_platform(packed.config)}
    linked = replace(soci, annotations={f"{_NAMES}image-manifest-digest": image.digest})
    listed = [
        replace(image, annotations=note).describe() | platform,
        linked.describe() | platform | {"artifactType": _SOCI},
    ]
    index = _make_document({"schemaVersion": 2, "mediaType": INDEX, "manifests": listed}, INDEX)
    blobs = (*(layer.blob for layer in packed.layers), packed.config, *tables, empty)
    return Publication(blobs, (image, soci), index)


def _describe_image(packed: Packed, annotations: Mapping[str, str] | None = None) -> dict[str, Any]:
    return _manifest(packed.config, [layer.blob for layer in packed.layers], annotations or {})


def _manifest(config: Blob, layers: Sequence[Blob], annotations: Mapping[str, str]) -> dict[str, Any]:
    document = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": config.describe(),
        "layers": [layer.describe() for layer in layers],
    }
    return document | ({"annotations": dict(sorted(annotations.items()))} if annotations else {})


def _make_document(document: Mapping[str, Any], media_type: str) -> Blob:
    return make_blob(json.dumps(document, separators=(",", ":")).encode(), media_type)


def _read_platform(config: Blob) -> dict[str, str]:
    document = json.loads(bytes(config.content))
    return {name: str(document[name]) for name in ("architecture", "os", "variant") if document.get(name)}


def _is_readable(layer: Layer) -> bool:
    """Returns whether each entry has a type that a zTOC can name."""
    return bool(layer.spans) and all(entry.type in _TYPES for entry in layer.entries)


def _make_table(layer: Layer) -> Blob:
    annotations = {
        f"{_NAMES}image-layer-mediaType": layer.blob.media_type,
        f"{_NAMES}image-layer-digest": layer.blob.digest,
        f"{_NAMES}span-size": str(SPAN),
    }
    if not any(_has_attributes(entry) for entry in layer.entries):
        annotations[f"{_NAMES}disable-xattrs"] = "true"
    return make_blob(write_ztoc(layer), "application/octet-stream", annotations)


def _has_attributes(entry: tarfile.TarInfo) -> bool:
    """Returns whether an entry has extended attributes, or hides all that lower layers have in its directory."""
    return entry.name.endswith(_OPAQUE) or any(name.startswith("SCHILY.xattr.") for name in entry.pax_headers)


def write_ztoc(layer: Layer) -> bytes:
    """Returns the table of contents of a gzip layer with spans and entries, as a FlatBuffer (ztoc.fbs of SOCI)."""
    import flatbuffers  # here, because it imports numpy if there is one

    builder = flatbuffers.Builder(len(layer.entries) * 256 + len(layer.spans) * (len(_WINDOW) + 256))
    entries = [_write_entry(builder, entry) for entry in layer.entries]
    contents = _write_table(builder, [("offset", _write_vector(builder, entries))])
    checkpoints = builder.CreateByteVector(_pack_checkpoints(layer.spans))
    digests = _write_vector(builder, [builder.CreateString(span.digest) for span in layer.spans])
    compression = _write_table(
        builder, [("int8", _GZIP), ("int32", len(layer.spans) - 1), ("offset", digests), ("offset", checkpoints)]
    )
    version, tool = builder.CreateString(_VERSION), builder.CreateString(_BUILDER)
    fields = [
        ("offset", version),
        ("offset", tool),
        ("int64", layer.blob.size),
        ("int64", layer.uncompressed),
        ("offset", contents),
        ("offset", compression),
    ]
    builder.Finish(_write_table(builder, fields))
    return bytes(builder.Output())


def _pack_checkpoints(spans: Sequence[Span]) -> bytes:
    """Returns the places where a reader can enter, as SOCI's gzip_zinfo.c stores them.

    Their number (4 bytes) and distance (8). Then for each its offsets in the file and in the tar (8 each), a number of
    bits (1), and the 32 KiB before it. Numbers are little-endian.
    """
    parts = [len(spans).to_bytes(4, "little"), SPAN.to_bytes(8, "little")]
    for span in spans:
        parts += [span.compressed.to_bytes(8, "little"), span.uncompressed.to_bytes(8, "little"), b"\0", _WINDOW]
    return b"".join(parts)


def _write_entry(builder: Any, entry: tarfile.TarInfo) -> int:
    attributes = sorted(entry.pax_headers.items())
    pairs = [[("offset", builder.CreateString(part)) for part in pair] for pair in attributes]
    xattrs = _write_vector(builder, [_write_table(builder, pair) for pair in pairs])
    name = f"{entry.name}/" if entry.isdir() else entry.name
    texts = {
        field: builder.CreateSharedString(text.encode("utf-8", "surrogateescape"))
        for field, text in {
            "name": name,
            "type": _TYPES[entry.type],
            "link": entry.linkname,
            "user": entry.uname,
            "group": entry.gname,
            "time": _format_time(entry),
        }.items()
    }
    fields = [
        ("offset", texts["name"]),
        ("offset", texts["type"]),
        ("int64", entry.offset_data),
        ("int64", entry.size),
        ("offset", texts["link"]),
        ("int64", entry.mode),
        ("uint32", entry.uid),
        ("uint32", entry.gid),
        ("offset", texts["user"]),
        ("offset", texts["group"]),
        ("offset", texts["time"]),
        ("int64", entry.devmajor),
        ("int64", entry.devminor),
        ("offset", xattrs),
    ]
    return _write_table(builder, fields)


def _format_time(entry: tarfile.TarInfo) -> str:
    """Returns the time of an entry as RFC 3339, with the fraction that the archive has."""
    whole, _, fraction = entry.pax_headers.get("mtime", str(int(entry.mtime))).partition(".")
    text = datetime.fromtimestamp(int(whole), UTC).strftime("%Y-%m-%dT%H:%M:%S")
    fraction = fraction[:9].rstrip("0")
    return f"{text}.{fraction}Z" if fraction else f"{text}Z"


def _write_vector(builder: Any, offsets: Sequence[int]) -> int:
    builder.StartVector(4, len(offsets), 4)
    for offset in reversed(offsets):
        builder.PrependUOffsetTRelative(offset)
    return int(builder.EndVector())


def _write_table(builder: Any, fields: Iterable[tuple[str, int]]) -> int:
    """Writes a table with all its fields, in the order of the schema."""
    fields = list(fields)
    writers = {
        "offset": builder.PrependUOffsetTRelativeSlot,
        "int8": builder.PrependInt8Slot,
        "int32": builder.PrependInt32Slot,
        "uint32": builder.PrependUint32Slot,
        "int64": builder.PrependInt64Slot,
    }
    builder.StartObject(len(fields))
    for slot, (kind, value) in enumerate(fields):
        writers[kind](slot, value, 0)
    return int(builder.EndObject())
