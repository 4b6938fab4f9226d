"""The largest sizes that Shoal takes from jobs, images and archives, and readers that keep to them.

What is larger is an error or a message, before the disk or the memory is full.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from shoal.errors import DiskError, SpecError

KIB, MIB, GIB = 1024, 1024**2, 1024**3
MOST_REPORT = 16 * MIB
"""Bytes of job.json and metrics.json. `train` writes kilobytes, and a document takes ten times its size in memory."""
MOST_RECORD = MIB
"""Bytes of the record of a job. A command writes kilobytes."""
MOST_HOSTS = 100_000
"""Hosts in the record of a job, which are listed by name."""
MOST_LOCK = 64 * MIB
"""Bytes of a file in a project that lists packages."""
MOST_TRACE = 512 * MIB
"""Bytes of the timeline of a rank, which is held in memory. An hour of training writes 10 MB."""
MOST_RANKS = 10_000
"""Ranks in a timeline. Each has rows on the page."""
MOST_PAGE = 8 * MIB
"""Bytes of a report that is read again. `shoal run` writes at most 6 MB, and a document takes 30 times its size."""
MOST_FAILURE = 64 * 1024
"""Bytes of the file `failure` that are read. `train` writes at most as much."""
MOST_ENTRIES = 1_000_000
"""Files and directories that are copied from one directory of a container: each takes an inode of the disk."""
MOST_DEPTH = 100
"""Directories in each other. Deeper ones exceed the longest path, and Python's recursion when they are removed."""
MOST_PATH = 4096
"""Characters of a path in an archive. Linux opens no longer one."""
MOST_HEADER = MIB
"""Bytes of a header for long names in a tar archive, which is held in memory."""
MOST_PROCESSES = 16_384
"""Processes and threads of a job in Docker if this machine does not tell how many it can have.

Otherwise a job may use half of them.
"""
MOST_LOG = 4 * GIB
"""Bytes of a job's log on the disk."""
MOST_LOG_LINE = MIB
"""Bytes of a line of output. Longer ones are split, since a line is held in memory."""
MOST_LAYER = 256 * GIB
"""Unpacked bytes of an image's layers. A gzip of 256 MiB can hold as much, and it would take hours."""
MOST_LAYERS = 1_000
"""Layers that an image names. Each takes time for all files of the image, and one may be named often."""
MOST_LAYER_ENTRIES = 5_000_000
"""Entries of an image's layers, which are held in memory. Large images have 300,000."""
MOST_LAYER_TEXT = 256 * MIB
"""Bytes of the names in an image, and of its files that describe packages. Held in memory, they take ten times as much.
An image with PyTorch has 7 MiB."""
MOST_OWNERS = 20_000
"""Packages and directories that a report about an image lists. Each has rows on its page."""
MOST_METADATA = 64 * 1024
"""Bytes of the metadata of a Python distribution in which its version is looked for."""
MOST_PROBED = 64 * MIB
"""Bytes of output of a command in an image that is inspected. Large images describe themselves in 1 MiB."""
MOST_PIP = 4 * GIB
"""Bytes of memory of pip, which holds pages of package indexes in it. It takes 100 MiB for our images."""
MOST_ANSWER = MIB
"""Bytes of a registry's answer that are read. A token has kilobytes."""
MOST_GIT, MOST_GIT_OUTPUT = GIB, MIB
"""Bytes of memory of git, and of its output. For Linux's repository it takes 200 MiB."""
KEPT_FREE = 32 * MIB
"""Bytes of a disk that large files, and many small ones, leave free, for the reports and logs of other jobs."""
_BLOCK = 4096  # bytes of a disk that the smallest file or directory takes
_MOST_DIGITS = 300  # of an integer: a float has no more


class Room:
    """The free space of a disk, and the number of entries, for files that are copied to it.

    Sizes count with their holes, so a sparse file of petabytes is refused before it is read.
    """

    def __init__(self, directory: Path, entries: int = MOST_ENTRIES) -> None:
        self._directory, self._entries = directory, entries
        self._left = shutil.disk_usage(directory).free
        self._unchecked = 0  # bytes since the disk was looked at

    def take(self, name: str, size: int) -> None:
        """Counts an entry. Raises `DiskError` if it does not fit."""
        self._entries -= 1
        if self._entries < 0:
            raise DiskError(
                f"{name}: more than {MOST_ENTRIES:,} files and directories. Fix: pack them into archives in the script"
            )
        kept, unchecked = 0, self._unchecked + max(size, _BLOCK)
        if unchecked >= MIB:
            self._left, kept = min(self._left, shutil.disk_usage(self._directory).free), KEPT_FREE
        if size > self._left - kept:
            raise DiskError(
                f"{name}: it has {size:,} bytes, and {self._directory} has {max(self._left - kept, 0):,} bytes left."
                " Fix: free space (df shows which disk is full), or choose another --output"
            )
        self._unchecked = 0 if kept else unchecked
        self._left -= max(size, _BLOCK)


def walk(top: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yields what `os.walk` does. Directories in more than `MOST_DEPTH` others are left out: Python cannot go there."""
    for directory, names, files in os.walk(top):
        if is_too_deep(directory, top):
            names.clear()
        yield directory, names, files


def is_too_deep(directory: str | os.PathLike[str], top: Path) -> bool:
    """Returns whether directories in a directory below `top` are in too many others."""
    return len(Path(directory).relative_to(top).parts) >= MOST_DEPTH


def open_file(path: Path) -> int:
    """Returns a file descriptor that reads a path, which may be anything: no link is followed, no pipe waited for."""
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)


def open_regular(path: Path, *, follow: bool = False) -> IO[bytes]:
    """Opens a path, which may be anything. A pipe is not waited for.

    Args:
        path: The file.
        follow: Whether a link is followed.

    Raises:
        OSError: If it cannot be opened.
        ValueError: If it is not a regular file.
    """
    if not follow and path.is_symlink():
        raise ValueError("a link")
    file = os.fdopen(open_file(Path(os.path.realpath(path)) if follow else path), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ValueError("not a file")
    return file


def read_file(path: Path, most: int, *, cut: bool = False, follow: bool = False) -> bytes:
    """Returns the content of a file that a job or a project has left. A pipe is not waited for.

    Args:
        path: The file.
        most: The largest number of bytes.
        cut: Return the first `most` bytes of a larger file.
        follow: Whether a link is followed.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it is not a file, or larger.
    """
    with open_regular(path, follow=follow) as file:
        content = file.read(most + 1)
    if len(content) > most and not cut:
        raise ValueError(f"larger than {most:,} bytes")
    return content[:most]


def read_project_file(path: Path) -> str:
    """Returns the text of a file of a project, such as a lock.

    Raises FileNotFoundError, and `SpecError` if it is something else, too large, or not UTF-8.
    """
    try:
        return read_file(path, MOST_LOCK, follow=True).decode()
    except ValueError as error:
        raise SpecError(f"{path}: {error}. Fix: replace it by a text file") from error


def parse_json(content: bytes) -> Any:
    """Returns a JSON document of a job, which can be written as JSON again.

    NaN, infinite and very long numbers become text, and lone surrogates question marks. Raises ValueError.
    """
    try:
        return _replace_surrogates(
            json.loads(content.decode(), parse_constant=str, parse_float=_parse_float, parse_int=_parse_int)
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _parse_float(text: str) -> float | str:
    value = float(text)
    return value if math.isfinite(value) else text


def _parse_int(text: str) -> int | str:
    return int(text) if len(text) <= _MOST_DIGITS else text


def _replace_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [_replace_surrogates(each) for each in value]
    if isinstance(value, dict):
        return {_replace_surrogates(key): _replace_surrogates(each) for key, each in value.items()}
    return value
