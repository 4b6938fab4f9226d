"""The files of an image, from the archive of a container of it that is never started: nothing of the image runs."""

from __future__ import annotations

import hashlib
import re
import stat
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, cast

import docker
import pydantic

from shoal.docker_client import containers
from shoal.layers import owners
from shoal.layers.saved_image import Chunks, Entry, entry_kind, normalize_path

_BLOCK = 1 << 20
_HEADER = 16  # of bytecode: four bytes each for a magic number, flags, the source's time and its size
_XATTR = "SCHILY.xattr."
_LABEL = "security.selinux"  # which the engine gives, a new one to each container
_ENGINES = frozenset(
    {
        *(".dockerenv", "dev", "dev/console", "dev/pts", "dev/shm", "proc", "sys"),
        *("etc/hostname", "etc/hosts", "etc/mtab", "etc/resolv.conf"),
    }
)
"""What an engine makes in every container."""
_TOUCHED = "etc"
"""The directory whose time is that of the container, for what the engine makes in it."""
_KEPT = re.compile(r"var/lib/dpkg/info/([^/:]+)(:[^/.]+)?\.[^/.]+")
"""What dpkg keeps of a package; the first group is its name."""
_DESCRIBES = re.compile(r"var/lib/dpkg/(status|info/[^/]+\.list)")
_TYPES = {
    tarfile.DIRTYPE: stat.S_IFDIR,
    tarfile.SYMTYPE: stat.S_IFLNK,
    tarfile.CHRTYPE: stat.S_IFCHR,
    tarfile.BLKTYPE: stat.S_IFBLK,
    tarfile.FIFOTYPE: stat.S_IFIFO,
}


class File(pydantic.BaseModel):
    """A file, directory or link. mode: with its type. time: ns since 1970. content: a file's SHA-256 (of bytecode
    without `source_time`, in s since 1970), or a link's target. attributes: the extended ones, hexadecimal. package:
    the one of Debian that it belongs to, or empty."""

    mode: int
    uid: int
    gid: int
    time: int
    content: str
    source_time: int
    attributes: dict[str, str] = {}
    package: str = ""


class Image(pydantic.BaseModel):
    """The files of an image by path, and the versions of its Debian packages by name."""

    files: dict[str, File]
    packages: dict[str, str] = {}


def read(client: docker.DockerClient, tag: str) -> Image:
    """Return what a container of the image would see. Raises DockerError if the engine does not have it."""
    label = containers.unique_name("files")
    settings = {"network_mode": "none", "labels": {containers.JOB_LABEL: label}}
    with containers.remove_at_end(client, label):
        container = containers.create_container(client, tag, ["never-started"], settings)
        chunks: Iterator[bytes] = container.export()  # type: ignore[assignment]  # the SDK's stubs say str
        return of_archive(chunks)


def of_archive(chunks: Iterable[bytes]) -> Image:
    """Return the files and packages in a tar archive of a container's whole file system."""
    files: dict[str, File] = {}
    entries: list[Entry] = []
    with tarfile.open(fileobj=cast(IO[bytes], Chunks(chunks)), mode="r|", bufsize=_BLOCK) as archive:
        for member in archive:
            archive.members = []  # type: ignore[attr-defined]  # it would keep them all
            path = normalize_path(member.name)
            if path in _ENGINES or path == ".":
                continue
            content = archive.extractfile(member) if member.isfile() else None
            text = content.read() if content and _DESCRIBES.fullmatch(path) else None
            files[f"/{path}"] = _file(member, [text] if text is not None else _blocks(content), files)
            target = member.linkname if member.issym() else normalize_path(member.linkname) if member.islnk() else ""
            entries.append(Entry(path, entry_kind(member), target, 0, 0, text))
    status = next((entry.text for entry in entries if entry.path == owners.STATUS), None)
    packages = {package.name: package.version for package in owners.debian_packages(status or b"")}
    for path, name in _packages(entries):
        files[path] = files[path].model_copy(update={"package": name})
    return Image(files=files, packages=packages)


def _packages(entries: list[Entry]) -> Iterator[tuple[str, str]]:
    """Yield each path that belongs to a package of Debian, and the package."""
    claims = owners.Owners([entries])
    for entry in entries:
        owner = claims.find_owner(entry)
        if kept := _KEPT.fullmatch(entry.path):
            yield f"/{entry.path}", kept[1]
        elif owner.kind == "debian":
            yield f"/{entry.path}", owner.name


def _file(member: tarfile.TarInfo, blocks: Iterable[bytes], others: Mapping[str, File]) -> File:
    content, source_time = "", 0
    if member.issym():
        content = member.linkname
    elif member.islnk():
        shared = others.get(f"/{normalize_path(member.linkname)}")
        content, source_time = (shared.content, shared.source_time) if shared else ("", 0)
    elif member.isfile():
        content, source_time = _digest(blocks, is_bytecode=member.name.endswith(".pyc"))
    attributes = {
        name.removeprefix(_XATTR): value
        for name, value in member.pax_headers.items()
        if name.startswith(_XATTR) and name != _XATTR + _LABEL
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


def _blocks(content: IO[bytes] | None) -> Iterator[bytes]:
    while content and (block := content.read(_BLOCK)):
        yield block


def _digest(blocks: Iterable[bytes], *, is_bytecode: bool) -> tuple[str, int]:
    """Return the SHA-256 of a file; of bytecode, without its source's time, which stands beside it."""
    sum_, time = hashlib.sha256(), b""
    for number, block in enumerate(blocks):
        if number == 0 and is_bytecode and block[4:8] == bytes(4) and len(block) >= _HEADER:
            block, time = block[:8] + bytes(4) + block[12:], block[8:12]  # it is valid while its source has this time
        sum_.update(block)
    return sum_.hexdigest(), int.from_bytes(time, "little")
