"""Unpacks the user's code: `python -m shoal_toolkit.sidecars.unpack ADDRESS DIRECTORY` fills DIRECTORY/code.

A process of its own, since reading archives and speaking to S3 takes more memory than the launcher has. Stdout says why
it failed; the exit code is that of the error.

An archive may have been made by somebody else, and an early Python 3.11 cannot filter its members. So here a member
that leaves the directory by its name or by a link, or that is a device, ends the job with an error that names it (the
stock toolkit skips it); owners, the set-user-ID bits and write permissions for others are dropped. What is unpacked
must fit on the disk, and a damaged archive is an error even where tarfile takes it for a short one.
"""

from __future__ import annotations

import lzma
import os
import shutil
import sys
import tarfile
import zlib
from collections.abc import Sequence

from shoal_toolkit.errors import ContractError, LaunchError, TrainError
from shoal_toolkit.job.source import S3
from shoal_toolkit.light_typing import NamedTuple

_SUFFIXES = (".tar.gz", ".tgz")
_BLOCK = 1 << 20


class Limits(NamedTuple):
    """How much an archive may hold."""

    size: int  # bytes
    members: int = 500_000


def main(argv: Sequence[str]) -> int:
    """Return the exit code; a failure is explained on stdout."""
    address, directory = argv
    try:
        unpack(address, directory)
    except TrainError as error:
        os.write(1, str(error).encode("utf-8", "backslashreplace"))
        return error.exit_code
    return 0


def unpack(address: str, directory: str) -> None:
    """Fetch what is at an address and unpack it. Raises TrainError."""
    target = os.path.join(directory, "code")
    os.mkdir(target)
    if not address.startswith(S3):
        _unpack_file(address, address, target)
        return
    from shoal_toolkit.sidecars import s3

    fetched = os.path.join(directory, "fetched")
    s3.download(address, fetched, os.environ)
    # S3 keeps no mode; a script that is not executable would depend on its name.
    os.chmod(fetched, 0o755)
    _unpack_file(fetched, address, target)
    os.unlink(fetched)


def _unpack_file(path: str, address: str, target: str) -> None:
    try:
        if tarfile.is_tarfile(path):
            disk = os.statvfs(target)
            extract(path, target, Limits(disk.f_bavail * disk.f_frsize // 10 * 9))
        elif address.endswith(_SUFFIXES):
            raise tarfile.ReadError("it is not a tar archive")
        else:
            shutil.copy(path, os.path.join(target, os.path.basename(address)))
    except ContractError as error:
        raise ContractError(f"{address}: {error}") from None
    except (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        if getattr(error, "errno", None) is None:  # gzip and bz2 raise an OSError of their own
            raise ContractError(f"{address} is damaged or cut short: {error}.") from None
        raise LaunchError(f"{address} cannot be unpacked to {target}: {error}.") from None


def extract(archive: str, directory: str, limits: Limits) -> None:
    """Unpack a tar archive into an empty directory. Raises ContractError naming the member that is not allowed."""
    size = 0
    with tarfile.open(archive, "r:*") as tar:
        for count, member in enumerate(tar, start=1):
            size += member.size if member.isreg() else 0
            if member.size < 0 or size > limits.size or count > limits.members:
                raise _refusal(
                    member,
                    f"with it the archive holds {count:,} members of {size:,} bytes; at most {limits.members:,} members"
                    f" and {limits.size:,} bytes, which is what the disk has room for, are unpacked",
                )
            _place(tar, member, directory)
        _check_end(tar, limits)


def _place(tar: tarfile.TarFile, member: tarfile.TarInfo, root: str) -> None:
    """Make one member. Its parents are real directories, so that no path goes through a link of the archive."""
    parts = _parts(member)
    path = os.path.join(root, *parts)
    for depth in range(1, len(parts)):
        _make_directory(member, os.path.join(root, *parts[:depth]))
    if member.isdir():
        _make_directory(member, path)
    elif not parts:
        raise _refusal(member, "it has no name")
    elif member.isreg():
        _write(tar, member, path)
    elif member.issym():
        _check_link(member, parts)
        _make_room(member, path)
        os.symlink(member.linkname, path)
    elif member.islnk():
        _link(member, root, path)
    else:
        raise _refusal(member, "it is a device, a FIFO or of an unknown kind; only files, directories and links are")


def _parts(member: tarfile.TarInfo) -> list[str]:
    parts = [part for part in member.name.split("/") if part not in ("", ".")]
    if member.name.startswith("/") or ".." in parts:
        raise _refusal(member, "its name leaves the code directory")
    return parts


def _check_link(member: tarfile.TarInfo, parts: Sequence[str]) -> None:
    """A relative link may climb as far as the code directory, before it descends: so it ends inside by any reading."""
    steps = member.linkname.split("/")
    climbed = next((index for index, step in enumerate(steps) if step != ".."), len(steps))
    if member.linkname.startswith("/") or ".." in steps[climbed:] or climbed >= len(parts):
        raise _refusal(member, f"it is a link to {member.linkname!r}, outside the code directory")


def _link(member: tarfile.TarInfo, root: str, path: str) -> None:
    target = os.path.join(root, member.linkname)
    inside = not member.linkname.startswith("/") and ".." not in member.linkname.split("/")
    if not inside or os.path.realpath(target) != os.path.normpath(
        os.path.join(os.path.realpath(root), member.linkname)
    ):
        raise _refusal(member, f"it is a link to {member.linkname!r}, outside the code directory")
    if not os.path.isfile(target):
        raise _refusal(member, f"it is a link to {member.linkname!r}, which is no file of the archive before it")
    _make_room(member, path)
    os.link(target, path)


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
    _make_room(member, path)
    source = tar.extractfile(member)
    assert source is not None
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        shutil.copyfileobj(source, file, _BLOCK)
    os.chmod(path, member.mode & 0o755 | 0o600)


def _make_directory(member: tarfile.TarInfo, path: str) -> None:
    if os.path.islink(path) or os.path.isfile(path):
        raise _refusal(member, "its path goes through something that is not a directory")
    os.makedirs(path, exist_ok=True)


def _make_room(member: tarfile.TarInfo, path: str) -> None:
    """An archive may hold a file several times: the last one counts."""
    if os.path.isdir(path) and not os.path.islink(path):
        raise _refusal(member, "it has the name of a directory")
    if os.path.lexists(path):
        os.unlink(path)


def _check_end(tar: tarfile.TarFile, limits: Limits) -> None:
    """tarfile takes a broken header for the end, and leaves the checksum of what was compressed unread."""
    file = tar.fileobj
    assert file is not None
    file.seek(tar.offset)
    end = file.read(tarfile.BLOCKSIZE)
    if len(end) < tarfile.BLOCKSIZE or any(end):
        raise tarfile.ReadError("there is no end mark behind the last member")
    for _ in range(limits.size // _BLOCK + 1):
        if not file.read(_BLOCK):
            return


def _refusal(member: tarfile.TarInfo, why: str) -> ContractError:
    return ContractError(f"the member {member.name!r} is refused: {why}.")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
