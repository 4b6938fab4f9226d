"""Tar archives: files and trees packed for Docker; files from a container unpacked without trusting them.

Archives of others are read once, from begin to end. Their headers cannot fill the memory.
"""

from __future__ import annotations

import contextlib
import io
import os
import posixpath
import re
import stat
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import IO, Any, NoReturn

from shoal import limits
from shoal.clean_text import print_error
from shoal.errors import is_disk_full
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


class Chunks(io.RawIOBase):
    """A readable file over an iterable of bytes, which is read once from begin to end."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks, self._rest = iter(chunks), memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fills the buffer from the current chunk, or the next one. Returns 0 at the end."""
        while not self._rest:
            try:
                self._rest = memoryview(next(self._chunks))
            except StopIteration:
                return 0
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size


def is_tar(begin: bytes) -> bool:
    """Returns whether a file begins like a tar archive, from its first 512 bytes."""
    return begin[257:262] == b"ustar" or (len(begin) == 512 and not any(begin))


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


Content = bytes | Path
_ZEROS = bytes(64 * 1024)
_MOST_HOPS = 40  # links on the way to a file, as in Linux
_MOST_STEPS_OF_ALL = 5_000_000  # of all links of a directory, in a minute
_MOST_STEPS = 512  # directories and links on the way to a file: links with long targets would take minutes


def pack_tree(
    root: Path,
    arcname: str,
    out: IO[bytes],
    owner: tuple[int, int] = (0, 0),
    left_out: str | None = None,
    room: limits.Room | None = None,
) -> None:
    """Writes the tree at `root` as `arcname`, owned by a user and group, and rewinds `out`. Directories get mode 0755.

    The entry `left_out` of `root` is not written. Nor are directories in more than `MOST_DEPTH` others, with a line on
    standard error. Raises `DiskError` if `room` has no place for an entry: a sparse file
    takes its whole size there.
    """

    def select(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if left_out and entry.name == f"{arcname}/{left_out}":
            return None
        if entry.isdir() and entry.name.count("/") > arcname.count("/") + limits.MOST_DEPTH:
            print_error(f"warning: {entry.name}: directories in more than {limits.MOST_DEPTH} others are not copied")
            return None
        if room:
            room.take(entry.name, entry.size)
        entry.uid, entry.gid = owner
        entry.uname = entry.gname = ""  # a name would count, and this machine's users are others
        if entry.isdir():
            entry.mode = 0o755
        return entry

    with tarfile.open(fileobj=out, mode="w") as archive:
        archive.add(root, arcname, filter=select)
    out.seek(0)


def write_tar(
    contents: Mapping[str, Content], out: IO[bytes], executable: Callable[[str], bool] = lambda _: False, time: int = 0
) -> None:
    """Writes files by path as a USTAR archive, so that equal contents give equal bytes.

    Args:
        executable: Whether the file at a path gets mode 0755, not 0644.
        time: The time stamp of all files, in seconds since 1970.
    """
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, content in sorted(contents.items()):
            with content.open("rb") if isinstance(content, Path) else io.BytesIO(content) as file:
                add_file(archive, name, file, mode=0o755 if executable(name) else 0o644, time=time)


def add_file(
    archive: tarfile.TarFile,
    name: str,
    file: IO[bytes],
    mode: int = 0o644,
    time: int = 0,
    owner: tuple[int, int] = (0, 0),
) -> None:
    """Adds a file, from its first byte to its last, to an archive."""
    entry = tarfile.TarInfo(name)
    entry.uid, entry.gid = owner
    entry.mtime, entry.mode, entry.size = time, mode, file.seek(0, io.SEEK_END)
    file.seek(0)
    archive.addfile(entry, file)


def pack_file(
    name: str, content: bytes, mode: int = 0o644, owner: tuple[int, int] = (0, 0), *, replaces_links: bool = False
) -> bytes:
    """Returns an archive of one file, which belongs to a user and a group.

    With `replaces_links` it has the directories above the file too. Docker puts them in the place of links of an image.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for directory in reversed(PurePosixPath(name).parents[:-1] if replaces_links else ()):
            entry = tarfile.TarInfo(str(directory))
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(entry)
        add_file(archive, name, io.BytesIO(content), mode, owner=owner)
    return buffer.getvalue()


def unpack_safely(source: IO[bytes], target: Path, origin: str | None = None) -> Iterator[str]:
    """Unpacks regular files, directories, and links that lead to files of the archive; yield each omission in words.

    It unpacks only while the caller iterates, and reads the archive once, from begin to end. Such a link becomes
    another name of the file. With `origin`, symbolic links stay links, also to directories, unless they lead out of
    their topmost directory. Files keep their time and permissions, without setuid and setgid, and are readable for this
    user. Holes of files stay holes. `tarfile`'s own `filter="data"` is missing in Debian 12's Python (3.11.2), and
    would let one odd file stop the others.

    Args:
        source: The archive.
        target: The directory, which is created if it is missing.
        origin: The directory from which the archive was made. Absolute links into it become relative ones.

    Raises:
        DiskError: If they do not fit on the disk, before it is full.
    """
    target.mkdir(parents=True, exist_ok=True)
    room = limits.Room(target)
    symlinks: list[tuple[str, str]] = []
    directories: list[tuple[Path, float]] = []
    with open_stream(source) as archive:
        for entry in archive:
            archive.members = []  # type: ignore[attr-defined]  # otherwise tarfile keeps all members in memory
            room.take(entry.name, entry.size)
            if problem := _find_problem(entry):
                yield f"{entry.name}: {problem}"
            elif entry.issym():
                symlinks.append((entry.name, entry.linkname))
            elif problem := _unpack(archive, entry, target):
                yield f"{entry.name}: {problem}"
            elif entry.isdir():
                directories.append((target / entry.name, entry.mtime))
    yield from _link_files(dict(symlinks), target) if origin is None else _make_symlinks(symlinks, target, origin)
    for directory, mtime in reversed(directories):  # files in them have changed their times
        set_time(directory, mtime)


def _find_problem(entry: tarfile.TarInfo) -> str:
    path = PurePosixPath(entry.name)
    if path.is_absolute() or ".." in path.parts:
        return "outside the directory"
    if not path.parts and not entry.isdir():
        return "without a name"
    if len(path.parts) > limits.MOST_DEPTH:
        return f"in more than {limits.MOST_DEPTH} directories"
    has_place = entry.isdir() or entry.isfile() or entry.islnk() or entry.issym()
    return "" if has_place else "neither a file nor a directory"


def _unpack(archive: tarfile.TarFile, entry: tarfile.TarInfo, target: Path) -> str:
    """Returns the problem, if any. Raises OSError if the disk is full. No path leads through a link yet."""
    try:
        _make(archive, entry, target)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and is_disk_full(error):
            raise
        return getattr(error, "strerror", None) or str(error)
    return ""


def _make(archive: tarfile.TarFile, entry: tarfile.TarInfo, target: Path) -> None:
    path = target / entry.name
    if entry.isdir():
        path.mkdir(parents=True, exist_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if entry.islnk():
        _add_name(target, PurePosixPath(entry.linkname), path)
        return
    content = archive.extractfile(entry)
    assert content is not None  # of a file it never is
    with path.open("xb") as out:
        copy_with_holes(content, out)
    path.chmod(entry.mode & 0o777 | stat.S_IRUSR | stat.S_IWUSR)
    set_time(path, entry.mtime)


def _add_name(target: Path, name: PurePosixPath, path: Path) -> None:
    """Makes a hard link to a file of the archive, which takes no space. Raises ValueError if it is not among them."""
    file = target / name
    if name.is_absolute() or ".." in name.parts or not file.is_file():
        raise ValueError(f"a link to {name}, which is not among the files")
    path.hardlink_to(file)


def _link_files(links: Mapping[str, str], target: Path) -> Iterator[str]:
    """Makes another name of a file for each symbolic link to one; yields a message for each other link."""
    for name, link in links.items():
        place = name
        for _ in range(_MOST_HOPS):  # through further links
            if place not in links:
                break
            place = posixpath.normpath(posixpath.join(posixpath.dirname(place), links[place]))
        path = target / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _add_name(target, PurePosixPath(place), path)
        except (OSError, ValueError):
            yield f"{name}: a link to {link}, which is not among the files"


def _make_symlinks(links: Sequence[tuple[str, str]], target: Path, origin: str) -> Iterator[str]:
    """Makes symbolic links after all files, so that no file is written through one. Removes those that lead out."""
    made = []
    left = count_steps()
    for name, link in links:
        path = target / name
        top = target / PurePosixPath(name).parts[0]
        if path == top or not stays_inside(path.parent, top, left=left):
            yield f"{name}: outside the directory"
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(make_relative(link, posixpath.dirname(f"{origin}/{name}"), origin))
        except (OSError, ValueError) as error:
            yield f"{name}: a link to {link}, which cannot be made: {getattr(error, 'strerror', None) or error}"
        else:
            made.append((name, link, path, top))
    # A link can lead through another one, so that all must exist.
    for name, link, path, top in made:
        if not stays_inside(path, top, left=left):
            path.unlink()
            yield f"{name}: a link to {link}, which is outside the directory"


def count_steps() -> Iterator[int]:
    """Returns the limit of `stays_inside` for all links of a directory: a script can make a million long ones."""
    return iter(range(_MOST_STEPS_OF_ALL))


def stays_inside(path: Path, top: Path, *, by_its_name: bool = False, left: Iterator[int] | None = None) -> bool:
    """Returns whether a path leads to a place in `top` without leaving it on the way, wherever `top` is moved to.

    So `../top/file` does not: the directory may get another name. A circle of links leads nowhere, and stays inside. A
    very long way counts as one that leaves it, and so does each way if no steps are `left`. With `by_its_name`,
    absolute links into `top` stay inside too.
    """
    pending = [*reversed(path.relative_to(top).parts)]
    place = top
    hops = steps = 0
    while pending:
        steps += 1
        if steps > _MOST_STEPS or (left and next(left, None) is None):
            return False
        part = pending.pop()
        if part == "..":
            if place == top:
                return False
            place = place.parent
        elif (place / part).is_symlink():
            link = (place / part).readlink()
            link = Path(make_relative(str(link), str(place), str(top))) if by_its_name else link
            hops += 1
            if link.is_absolute():
                return False
            if hops > _MOST_HOPS:
                return True
            pending += reversed(link.parts)
        else:
            place /= part
    return True


def make_relative(link: str, directory: str, origin: str) -> str:
    """Returns the target of a link in `directory`, relative to it if the target is an absolute path in `origin`."""
    return posixpath.relpath(link, directory) if f"{link}/".startswith(f"{origin}/") else link


def copy_with_holes(source: IO[bytes], out: IO[bytes]) -> None:
    """Copies a file to a new one. Blocks of zeros become holes, which take no space."""
    while block := source.read(len(_ZEROS)):
        if block == _ZEROS[: len(block)]:
            out.seek(len(block), io.SEEK_CUR)
        else:
            out.write(block)
    out.truncate()


def set_time(path: Path, mtime: float) -> None:
    """Sets the time of a file or directory. A time that the file system cannot keep is ignored."""
    with contextlib.suppress(OSError, OverflowError, ValueError):
        os.utime(path, (mtime, mtime))
