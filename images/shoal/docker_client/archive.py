"""Tar archives: files and trees packed for Docker; files from a container unpacked without trusting them."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import stat
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import IO

Content = bytes | Path


def pack_tree(root: Path, arcname: str, out: IO[bytes], left_out: str | None = None) -> None:
    """Write the tree at `root` as `arcname`, owned by root, and rewind `out`. Directories get mode 0755.

    The entry `left_out` of `root` is not written.
    """

    def select(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        """Return an entry changed to belong to root, or None if it is left out."""
        return None if left_out and entry.name == f"{arcname}/{left_out}" else _owned_by_root(entry)

    with tarfile.open(fileobj=out, mode="w") as archive:
        archive.add(root, arcname, filter=select)
    out.seek(0)


def write_tar(
    contents: Mapping[str, Content], out: IO[bytes], executable: Callable[[str], bool] = lambda _: False, time: int = 0
) -> None:
    """Write files by path as a USTAR archive, so that equal contents give equal bytes.

    Args:
        executable: Whether the file at a path gets mode 0755, not 0644.
        time: The time stamp of all files, in seconds since 1970.
    """
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, content in sorted(contents.items()):
            with content.open("rb") if isinstance(content, Path) else io.BytesIO(content) as file:
                add_file(archive, name, file, mode=0o755 if executable(name) else 0o644, time=time)


def add_file(
    archive: tarfile.TarFile, name: str, file: IO[bytes], mode: int = 0o644, time: int = 0, owner: int = 0
) -> None:
    """Add a file, from its first byte to its last, to an archive."""
    entry = tarfile.TarInfo(name)
    entry.uid = entry.gid = owner
    entry.mtime, entry.mode, entry.size = time, mode, file.seek(0, io.SEEK_END)
    file.seek(0)
    archive.addfile(entry, file)


def pack_file(name: str, content: bytes, mode: int = 0o644, owner: int = 0) -> bytes:
    """Return an archive of one file, which belongs to root or another user and its group of the same number."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        add_file(archive, name, io.BytesIO(content), mode, owner=owner)
    return buffer.getvalue()


def unpack_safely(source: IO[bytes], target: Path, keep_symlinks: bool = False) -> Iterator[str]:
    """Unpack regular files, directories, and links that lead to files of the archive; yield each omission in words.

    It unpacks only while the caller iterates. Such a link becomes a copy of the file. With `keep_symlinks`, symbolic
    links stay links, also to directories, unless they lead out of their topmost directory. Files keep their time and
    permissions, without setuid and setgid, and are readable for this user. `tarfile`'s own `filter="data"` is missing
    in Debian 12's Python (3.11.2), and would let one odd file stop the others.
    """
    with tarfile.open(fileobj=source) as archive:
        symlinks, directories = [], []
        for entry in archive:
            path = PurePosixPath(entry.name)
            if path.is_absolute() or ".." in path.parts:
                yield f"{entry.name}: outside the directory"
            elif entry.isdir():
                (target / path).mkdir(parents=True, exist_ok=True)
                directories.append(entry)
            elif entry.issym() and keep_symlinks:
                symlinks.append(entry)
            elif entry.isfile() or entry.islnk() or entry.issym():
                yield from _unpack_file(archive, entry, target / path)
            else:
                yield f"{entry.name}: neither a file nor a directory"
        yield from _make_symlinks(symlinks, target)
        for entry in reversed(directories):  # files in them have changed their times
            _set_time(target / entry.name, entry)


def _make_symlinks(entries: Sequence[tarfile.TarInfo], target: Path) -> Iterator[str]:
    """Make symbolic links, and remove those that lead out of their topmost directory, with a message for each.

    They are made after all files, so that no file is written through one. They are checked when all exist, because a
    link can lead through another one.
    """

    def is_inside(path: Path) -> bool:
        top = Path(os.path.realpath(target), *path.relative_to(target).parts[:1])
        return Path(os.path.realpath(path)).is_relative_to(top)

    made = []
    for entry in entries:
        path = target / entry.name
        if not is_inside(path.parent):
            yield f"{entry.name}: outside the directory"
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.symlink_to(entry.linkname)
        except OSError as error:
            yield f"{entry.name}: a link to {entry.linkname}, which cannot be made: {error.strerror}"
        else:
            made.append((entry, path))
    for entry, path in made:
        if not is_inside(path):
            path.unlink()
            yield f"{entry.name}: a link to {entry.linkname}, which is outside the directory"


def _unpack_file(archive: tarfile.TarFile, entry: tarfile.TarInfo, path: Path) -> Iterator[str]:
    """Write a file, or the file that a link leads to. Links themselves are not made.

    Yields a message, and writes nothing, for a link to a file that is not in the archive.
    """
    try:
        content = archive.extractfile(entry)
    except (KeyError, RecursionError):  # it leads nowhere, or to itself
        content = None
    if content is None:
        yield f"{entry.name}: a link to {entry.linkname}, which is not among the files"
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as out:
        shutil.copyfileobj(content, out)
    if not entry.issym():  # the mode of a symlink has no meaning
        path.chmod(entry.mode & 0o777 | stat.S_IRUSR | stat.S_IWUSR)
    _set_time(path, entry)


def _set_time(path: Path, entry: tarfile.TarInfo) -> None:
    """Set the time of a file or directory from its entry. A time that the file system cannot keep is ignored."""
    with contextlib.suppress(OSError, OverflowError):
        os.utime(path, (entry.mtime, entry.mtime))


def _owned_by_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Change an entry to belong to root, a directory also to mode 0755, and return it."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    if entry.isdir():
        entry.mode = 0o755
    return entry
