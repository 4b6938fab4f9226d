"""Tar archives of others, read once from begin to end. Their headers cannot fill the memory."""

from __future__ import annotations

import re
import tarfile
from types import SimpleNamespace
from typing import IO, Any, NoReturn

from shoal.limits import MOST_HEADER

_AT_ONCE = 256 * 1024  # bytes of a read, a multiple of 512
_TEXT_TYPES = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
)
"""The types of entries that are a long name or attributes of the next one."""


_DIGITS = re.compile(rb"[0-9]{100,}")
_MOST_SQUARES = 2 * 4096**2  # of a path and a link that are nothing but digits: tarfile takes a tenth of a second
_MOST_DIGITS = 10  # of a length


def open_stream(source: IO[bytes], size: int = _AT_ONCE) -> tarfile.TarFile:
    """Returns a tar archive that is read once, from begin to end. Raises tarfile.ReadError at a huge header.

    Args:
        source: A file, which need not be seekable.
        size: How many bytes are read at once, a multiple of 512.
    """
    return tarfile.open(fileobj=source, mode="r|", bufsize=size, tarinfo=_Entry)


class _Entry(tarfile.TarInfo):
    """An entry with a limit for its headers, and without lists of holes, which Docker does not write."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Entry:
        entry = super().frombuf(buf, encoding, errors)
        if entry.type in _TEXT_TYPES and entry.size > MOST_HEADER:
            raise tarfile.ReadError(f"a header of {entry.size:,} bytes")
        return entry

    def _proc_pax(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        """Reads the attributes of the next entry. Raises tarfile.ReadError if tarfile would take hours for them."""
        stream: Any = archive.fileobj
        content = stream.read(self._block(self.size))  # type: ignore[attr-defined]
        _check_attributes(content[: self.size])

        def give(_: int) -> bytes:
            archive.fileobj = stream
            return content  # type: ignore[no-any-return]

        archive.fileobj = SimpleNamespace(read=give)
        return super()._proc_pax(archive)  # type: ignore[misc, no-any-return]

    def _refuse_holes(self, *_: object) -> NoReturn:
        raise tarfile.ReadError(f"{self.name}: a list of holes")

    _proc_sparse = _proc_gnusparse_10 = _refuse_holes
    """tarfile calls these for the lists that have any length."""


def _check_attributes(content: bytes) -> None:
    """Raises ReadError unless each attribute is `LENGTH NAME=VALUE` and a line end, without long numbers."""
    # tarfile looks for names beyond the length. Old versions search numbers for the square of their length.
    at = 0
    while at < len(content):
        length = content[at : at + _MOST_DIGITS].partition(b" ")[0]
        size = int(length) if length.isdigit() else 0
        record = content[at : at + size]
        if len(record) < size or not record.endswith(b"\n") or b"=" not in record:
            raise tarfile.ReadError("a header with wrong attributes")
        at += len(record)
    if sum(len(digits) ** 2 for digits in _DIGITS.findall(content)) > _MOST_SQUARES:
        raise tarfile.ReadError("a header of digits")
