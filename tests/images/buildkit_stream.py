"""What BuildKit says in the answer to a build, written as it does: protobuf in JSON lines."""

from __future__ import annotations

import base64


def varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def field(number: int, value: bytes | int) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def stamp(seconds: int, nanos: int = 0) -> bytes:
    return field(1, seconds) + field(2, nanos)


def vertex(name: str, *parts: bytes) -> bytes:
    return field(1, field(1, b"sha256:1") + field(3, name.encode()) + b"".join(parts))


def trace(*parts: bytes) -> dict[str, str]:
    return {"id": "moby.buildkit.trace", "aux": base64.b64encode(b"".join(parts)).decode()}


def log(text: bytes) -> bytes:
    return field(3, field(1, b"sha256:1") + field(4, text))
