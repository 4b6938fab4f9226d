"""Reads the fields of protobuf's wire format: field number and wire type, then a varint, eight, four or N bytes.

BuildKit's progress and TensorBoard's event files have such messages. Why no library: docs/decisions/written-by-hand.md.
"""

from __future__ import annotations

from collections.abc import Iterator


def split_fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yields the number and content of each field. Nested messages and strings stay bytes.

    Raises ValueError for an unknown wire type, and for a field that is cut.
    """
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _read_varint(data, at)
            yield key >> 3, value
            continue
        if kind == 2:
            size, at = _read_varint(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"protobuf wire type {kind} at byte {at}")
        if at + size > len(data):
            raise ValueError("a field that is cut")
        yield key >> 3, data[at : at + size]
        at += size


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns a number of up to 64 bits, and the place after it."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & (1 << 64) - 1, at
    raise ValueError("a number that is cut or too long")
