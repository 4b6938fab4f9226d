"""The files of an image, read from the exported archive of a container that is never started."""

from __future__ import annotations

import hashlib
import posixpath
import re
import stat
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, cast

import docker
import pydantic

from shoal.docker_client import containers
from shoal.docker_client.archive import Chunks, open_stream
from shoal.image import owners
from shoal.image.archive import Budget, Entry, normalize_path, read_entries

_BLOCK = 1 << 20
_HEADER = 16  # bytes of a .pyc header: magic number, flags, time and size of the source, four bytes each
_XATTR = "SCHILY.xattr."
_SELINUX = "security.selinux"  # Docker labels each container differently
_MADE_BY_DOCKER = frozenset(
    {
        *(".dockerenv", "dev", "dev/console", "dev/pts", "dev/shm", "proc", "sys"),
        *("etc/hostname", "etc/hosts", "etc/mtab", "etc/resolv.conf"),
    }
)
"""Files that Docker creates in every container."""
_TOUCHED = "etc"
"""The directory that Docker changes in every container, so that its time means nothing."""
_DPKG_FILE = re.compile(r"var/lib/dpkg/info/([^/:]+)(:[^/.]+)?\.[^/.]+")
"""A file that dpkg keeps about a package; the first group is the package's name."""
PYTHON = "python:"
"""The prefix of a Python distribution, because a Debian package may have the same name."""
_SITE_PACKAGES = re.compile(r"(?:site|dist)-packages$")
_TYPES = {
    tarfile.DIRTYPE: stat.S_IFDIR,
    tarfile.SYMTYPE: stat.S_IFLNK,
    tarfile.CHRTYPE: stat.S_IFCHR,
    tarfile.BLKTYPE: stat.S_IFBLK,
    tarfile.FIFOTYPE: stat.S_IFIFO,
}


class File(pydantic.BaseModel):
    """A file, directory or link."""

    mode: int
    """With the bits of its type."""
    uid: int
    gid: int
    time: int
    """In ns since 1970."""
    content: str
    """The SHA-256 of a file (of bytecode without `source_time`), or the target of a link."""
    source_time: int
    """The time of its source that bytecode records, in s since 1970; 0 for other files."""
    attributes: dict[str, str] = {}
    """Extended attributes, values in hexadecimal."""
    package: str = ""
    """The Debian package that it belongs to, or the Python distribution, after `python:`; empty if none."""


class FileSystem(pydantic.BaseModel):
    """The file system of an image."""

    files: dict[str, File]
    """By absolute path."""
    packages: dict[str, str] = {}
    """The versions of the Debian packages and Python distributions, by name."""


def read_filesystem(client: docker.DockerClient, tag: str) -> FileSystem:
    """Returns the file system of an image, through a container that is not started. Raises `DockerError`."""
    label = containers.unique_name("files")
    settings = {"network_mode": "none", "labels": {containers.JOB_LABEL: label}}
    with containers.remove_at_end(client, label):
        container = containers.create_container(client, tag, ["never-started"], settings)
        chunks: Iterator[bytes] = container.export()  # type: ignore[assignment]  # the SDK's stubs say str
        return parse_archive(chunks)


def parse_archive(chunks: Iterable[bytes]) -> FileSystem:
    """Returns the file system in a tar archive, as `docker export` writes it, with the package of each file.

    Files that Docker makes are left out. The archive is read once, as a stream.
    """
    files: dict[str, File] = {}
    entries: list[Entry] = []
    budget = Budget()
    with open_stream(cast(IO[bytes], Chunks(chunks)), _BLOCK) as archive:
        for member, entry, content in read_entries(archive, budget):
            budget.take(bytes_=member.size)
            if entry.path in _MADE_BY_DOCKER or entry.path == ".":
                continue
            blocks = _read_blocks(content) if entry.text is None else [entry.text]
            files[f"/{entry.path}"] = _make_file(member, blocks, files)
            entries.append(entry)
    claims = owners.Owners([entries])
    texts = {entry.path: entry.text for entry in entries if entry.text is not None}
    packages = {package.name: package.version for package in owners.debian_packages(texts.get(owners.STATUS, b""))}
    packages |= {PYTHON + each.name: each.version for each in owners.python_distributions(texts, claims)}
    for path, name in _assign_packages(entries, claims):
        files[path] = files[path].model_copy(update={"package": name})
    return FileSystem(files=files, packages=packages)


def _assign_packages(entries: list[Entry], claims: owners.Owners) -> Iterator[tuple[str, str]]:
    """Yields each path of a Debian package or Python distribution, with its name; `python:NAME` for the latter.

    A directory below site-packages belongs to the first Python distribution with a file in it.
    """
    directories = {entry.path for entry in entries if entry.kind == "directory"}
    for entry in entries:
        owner = claims.find_owner(entry)
        if match := _DPKG_FILE.fullmatch(entry.path):
            yield f"/{entry.path}", match[1]
        elif owner.kind == "debian":
            yield f"/{entry.path}", owner.name
        elif owner.kind == "python":
            yield f"/{entry.path}", PYTHON + owner.name
            parent = posixpath.dirname(entry.path)
            while parent in directories and not _SITE_PACKAGES.search(parent):
                directories.remove(parent)
                yield f"/{parent}", PYTHON + owner.name
                parent = posixpath.dirname(parent)


def _make_file(member: tarfile.TarInfo, blocks: Iterable[bytes], others: Mapping[str, File]) -> File:
    """`others` has the targets of hard links. Leaves out Docker's changes: the time of /etc, and SELinux's labels."""
    content, source_time = "", 0
    if member.issym():
        content = member.linkname
    elif member.islnk():
        shared = others.get(f"/{normalize_path(member.linkname)}")
        content, source_time = (shared.content, shared.source_time) if shared else ("", 0)
    elif member.isfile():
        content, source_time = _hash(blocks, is_bytecode=member.name.endswith(".pyc"))
    attributes = {
        name.removeprefix(_XATTR): value
        for name, value in member.pax_headers.items()
        if name.startswith(_XATTR) and name != _XATTR + _SELINUX
    }
    return File(
        mode=member.mode | _TYPES.get(member.type, stat.S_IFREG),
        uid=member.uid,
        gid=member.gid,
        time=0 if normalize_path(member.name) == _TOUCHED else int(member.mtime) * 10**9,
        content=content,
        source_time=source_time,
        attributes={name: value.encode("utf-8", "surrogateescape").hex() for name, value in attributes.items()},
    )


def _read_blocks(content: IO[bytes] | None) -> Iterator[bytes]:
    while content and (block := content.read(_BLOCK)):
        yield block


def _hash(blocks: Iterable[bytes], *, is_bytecode: bool) -> tuple[str, int]:
    """Returns the SHA-256 of a file and 0; for bytecode, the SHA-256 without the source's time, and that time in s."""
    sum_, time = hashlib.sha256(), b""
    for number, block in enumerate(blocks):
        if number == 0 and is_bytecode and block[4:8] == bytes(4) and len(block) >= _HEADER:
            block, time = block[:8] + bytes(4) + block[12:], block[8:12]  # the time only ties it to its source
        sum_.update(block)
    return sum_.hexdigest(), int.from_bytes(time, "little")
