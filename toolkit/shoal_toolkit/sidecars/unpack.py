"""Unpacks the user's code: `python -m shoal_toolkit.sidecars.unpack ADDRESS DIRECTORY` fills DIRECTORY/code.

It is a process of its own, because reading archives and S3 takes more memory than the launcher. If it fails, stdout has
the reason, and the exit code is the one of the error.

The archive may be from somebody else, and early versions of Python 3.11 can't filter its members. Therefore a device,
or a member that leaves the directory by its name or by a link, ends the job with an error. (The stock toolkit skips
it.) Owners, set-user-ID bits and write permissions for others are dropped. The archive must fit on the disk, and a
damaged archive is an error even if tarfile takes it for a short one.
"""

from __future__ import annotations

import lzma
import os
import shutil
import sys
import tarfile
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from shoal_toolkit.errors import ContractError, LaunchError, TrainError
from shoal_toolkit.job.code import S3

_SUFFIXES = (".tar.gz", ".tgz")
_BLOCK = 1 << 20


class Limits(NamedTuple):
    """The largest archive that is unpacked."""

    size: int  # bytes
    members: int = 500_000


def main(argv: Sequence[str]) -> int:
    """Unpacks the code at an address (argv: address, directory), and returns the exit code.

    If that fails, writes the reason to stdout.
    """
    address, directory = argv
    try:
        unpack(address, directory)
    except TrainError as error:
        os.write(1, str(error).encode("utf-8", "backslashreplace"))
        return error.exit_code
    return 0


def unpack(address: str, directory: str) -> None:
    """Fetches the code at an address and unpacks it to `directory`/code, which must not exist.

    An archive from S3 is in `directory`/fetched meanwhile. Raises TrainError if it can't be fetched or unpacked.
    """
    target = os.path.join(directory, "code")
    os.mkdir(target)
    if not address.startswith(S3):
        _unpack_file(address, address, target)
        return
    from shoal_toolkit.sidecars import s3

    fetched = os.path.join(directory, "fetched")
    s3.download(address, fetched, os.environ)
    # S3 keeps no mode. Without this, only scripts with a known suffix would be executable.
    os.chmod(fetched, 0o755)
    _unpack_file(fetched, address, target)
    os.unlink(fetched)


def _unpack_file(path: str, address: str, target: str) -> None:
    """Unpacks an archive; another file is copied under the name in its address."""
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
        if getattr(error, "errno", None) is None:  # an OSError of gzip or bz2
            raise ContractError(f"{address} is damaged or cut short: {error}. Fix: make it again.") from None
        raise LaunchError(f"{address} cannot be unpacked to {target}: {error}.") from None


def extract(archive: str, directory: str, limits: Limits) -> None:
    """Unpacks a tar archive into an empty directory.

    Raises ContractError with the name of a member that is refused, or at which the archive exceeds `limits`. A damaged
    archive raises the errors of tarfile and of its compression.
    """
    size = 0
    with tarfile.open(archive, "r:*") as tar:
        for count, member in enumerate(tar, start=1):
            size += member.size if member.isreg() else 0
            if member.size < 0 or size > limits.size or count > limits.members:
                size_text, free_text = f"{size:,} bytes", f"{limits.size:,} bytes, 90 % of the free space on the disk"
                has, allowed = f"{count:,} members of {size_text}", f"{limits.members:,} members of {free_text}"
                raise _refusal(
                    member, f"up to it the archive has {has}. Allowed are {allowed}", "files that no job needs"
                )
            _unpack_member(tar, member, directory)
        _check_end(tar, limits)


def _unpack_member(tar: tarfile.TarFile, member: tarfile.TarInfo, root: str) -> None:
    """Writes one member. Its parents must be real directories, so that no path leads through a link."""
    parts = _split_name(member)
    path = os.path.join(root, *parts)
    for depth in range(1, len(parts)):
        _make_directory(member, os.path.join(root, *parts[:depth]))
    if member.isdir():
        _make_directory(member, path)
    elif not parts:
        raise _refusal(member, "it has no name")
    elif member.isreg():
        _write_file(tar, member, path)
    elif member.issym():
        _check_link(member, parts)
        _remove_earlier(member, path)
        os.symlink(member.linkname, path)
    elif member.islnk():
        _write_hard_link(member, root, path)
    else:
        raise _refusal(member, "it is a device, a FIFO or of an unknown kind; only files, directories and links are")


def _split_name(member: tarfile.TarInfo) -> list[str]:
    """Returns the parts of a member's path. Raises ContractError if it is absolute or has `..`."""
    parts = [part for part in member.name.split("/") if part not in ("", ".")]
    if member.name.startswith("/") or ".." in parts:
        raise _refusal(member, "its name leaves the code directory")
    return parts


def _check_link(member: tarfile.TarInfo, parts: Sequence[str]) -> None:
    """A relative link may start with as many `..` as lead to the code directory."""
    steps = member.linkname.split("/")
    climbed = next((index for index, step in enumerate(steps) if step != ".."), len(steps))
    if member.linkname.startswith("/") or ".." in steps[climbed:] or climbed >= len(parts):
        raise _refusal(member, f"it is a link to {member.linkname!r}, outside the code directory")


def _write_hard_link(member: tarfile.TarInfo, root: str, path: str) -> None:
    """Makes a hard link to an earlier file of the archive. Raises ContractError for any other target."""
    target = os.path.join(root, member.linkname)
    inside = not member.linkname.startswith("/") and ".." not in member.linkname.split("/")
    if not inside or os.path.realpath(target) != os.path.normpath(
        os.path.join(os.path.realpath(root), member.linkname)
    ):
        raise _refusal(member, f"it is a link to {member.linkname!r}, outside the code directory")
    if not os.path.isfile(target):
        raise _refusal(member, f"it is a link to {member.linkname!r}, which is not an earlier file of the archive")
    _remove_earlier(member, path)
    os.link(target, path)


def _write_file(tar: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
    """Drops set-user-ID bits and write access for others. Raises ContractError if a directory has its name."""
    _remove_earlier(member, path)
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


def _remove_earlier(member: tarfile.TarInfo, path: str) -> None:
    """Removes an earlier file of the same name: the last one counts. Raises ContractError for a directory."""
    if os.path.isdir(path) and not os.path.islink(path):
        raise _refusal(member, "it has the name of a directory")
    if os.path.lexists(path):
        os.unlink(path)


def _check_end(tar: tarfile.TarFile, limits: Limits) -> None:
    """Checks the end mark and the checksum: tarfile takes a broken header for the end, and skips the checksum."""
    file = tar.fileobj
    assert file is not None
    file.seek(tar.offset)
    end = file.read(tarfile.BLOCKSIZE)
    if len(end) < tarfile.BLOCKSIZE or any(end):
        raise tarfile.ReadError("there is no end mark after the last member")
    for _ in range(limits.size // _BLOCK + 1):
        if not file.read(_BLOCK):
            return


def _refusal(member: tarfile.TarInfo, why: str, unwanted: str = "it") -> ContractError:
    return ContractError(f"the member {member.name!r} is refused: {why}. Fix: make the archive without {unwanted}.")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
