"""Memory that the processes of one host share: a file, mapped by each of them.

Where there is room it lies in /dev/shm, which containers often limit to 64 MiB; else in the directory for temporary
files, where the kernel writes it to the disk now and then. The file has a name only until all have mapped it: a job
that is killed later leaves nothing. What one killed earlier has left is removed by the next job on the host.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import stat
import tempfile
from pathlib import Path
from typing import NamedTuple

_PREFIX = "smddp-"
_MODE = 0o600
_SHARED_MEMORY = Path("/dev/shm")


class Process(NamedTuple):
    """A process of this host, told apart from later ones with its number."""

    pid: int
    started: int  # in the kernel's count; 0: it is gone
    host: str  # of this start of the machine, and of this /dev/shm: containers of one machine have one each
    namespace: str  # of process numbers: in another one, a number says nothing

    @property
    def lives(self) -> bool:
        """Whether it still runs; what cannot be seen from here is taken to."""
        return (self.host, self.namespace) != (_host(), _namespace()) or self.started == _started(self.pid)


def this_process() -> Process:
    """Return the calling process."""
    return Process(os.getpid(), _started(os.getpid()), _host(), _namespace())


def room() -> int:
    """Return how many bytes are free where memory is shared best; 0 where there is no such place."""
    try:
        found = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def create(size: int) -> tuple[Path, mmap.mmap]:
    """Make a file of `size` bytes, all zero, and map it; returns its path, for `attach`.

    Raises OSError where neither directory has room: no access to the memory will.
    """
    problem: OSError | None = None
    for directory in (_SHARED_MEMORY, Path(tempfile.gettempdir())):
        _remove_leftovers(directory)
        owner = this_process()
        path = directory / f"{_PREFIX}{_number(owner.namespace)}-{owner.pid}-{owner.started}-{secrets.token_hex(8)}"
        try:
            return path, _map(path, size, os.O_CREAT | os.O_EXCL)
        except OSError as error:
            problem = error
            path.unlink(missing_ok=True)
    raise OSError(f"no room for {size >> 20} MiB of shared memory: {problem}")


def attach(path: Path, size: int) -> mmap.mmap:
    """Map a file of so many bytes that another process of this user has made by `create`.

    The path comes through a store into which strangers may write. Raises OSError where it is none of ours, or cannot be
    seen from here.
    """
    about = path.lstat()
    mode, owner = about.st_mode, about.st_uid
    if (mode, owner, about.st_size) != (stat.S_IFREG | _MODE, os.geteuid(), size) or not path.name.startswith(_PREFIX):
        raise OSError(f"{path} is no shared memory of this job")
    return _map(path, size, 0)


def _map(path: Path, size: int, flags: int) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, _MODE)
    try:
        if flags:
            os.posix_fallocate(fd, 0, size)  # a full disk is an error here, and a SIGBUS later
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)


def _remove_leftovers(directory: Path) -> None:
    """Remove the files of processes that have ended between making them and all mapping them."""
    for path in directory.glob(f"{_PREFIX}{_number(_namespace())}-*-*-*"):  # elsewhere a process number says nothing
        _, pid, started, _ = path.name[len(_PREFIX) :].split("-", 3)
        try:
            if path.stat().st_uid == os.getuid() and _started(int(pid)) != int(started):
                path.unlink(missing_ok=True)
        except (OSError, ValueError):
            continue  # somebody else's, or gone by now


def _started(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in ("Z", "X") else int(fields[19])


def _number(namespace: str) -> str:
    """pid:[4026531836] is 4026531836."""
    return "".join(filter(str.isdigit, namespace)) or "0"


def _host() -> str:
    """What ranks that may share memory have in common; SMDDP_HOST parts those that shall not."""
    named = os.environ.get("SMDDP_HOST", "")
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{named}:{boot}:{_SHARED_MEMORY.stat().st_dev}"
    except OSError:
        return f"{named}:{socket.gethostname()}"


def _namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""
