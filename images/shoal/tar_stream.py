"""Tar archives of others, read once from begin to end. Their headers cannot fill the memory."""

from __future__ import annotations

import tarfile
from typing import IO, NoReturn

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


def open_stream(source: IO[bytes], size: int = _AT_ONCE) -> tarfile.TarFile:
    """Returns a tar archive that is read once, from begin to end. Raises tarfile.ReadError at a huge header.

    Args:
        source: A file, which need not be seekable.
        size: How many bytes are read at once, a multiple of 512.
    """
    return tarfile.open(fileobj=source, mode="r|", bufsize=size, tarinfo=_Entry)


class _Entry(tarfile.TarInfo):
    """An entry. What is held in memory of it has a limit: a header for long names or attributes, and no list of holes.

    Docker writes no such lists.
    """

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Entry:
        """Returns the entry of a header. Raises tarfile.ReadError if its text is too long."""
        entry = super().frombuf(buf, encoding, errors)
        if entry.type in _TEXT_TYPES and entry.size > MOST_HEADER:
            raise tarfile.ReadError(f"a header of {entry.size:,} bytes")
        return entry

    def _refuse_holes(self, *_: object) -> NoReturn:
        raise tarfile.ReadError(f"{self.name}: a list of holes")

    _proc_sparse = _proc_gnusparse_10 = _refuse_holes
    """tarfile calls these for the lists that have any length."""
