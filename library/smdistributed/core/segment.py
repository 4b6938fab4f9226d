"""Shared memory of the processes of one host: a file that each of them maps.

The file is in /dev/shm if it fits there; containers often limit that to 64 MiB. Otherwise it is in the directory for
temporary files, and the kernel sometimes writes its pages to disk. The file has a name only until all processes have
mapped it, so a job that is killed later leaves nothing behind. The next job on the host removes older leftovers.
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
    """A process of this host; its start time distinguishes it from a later one with the same number."""

    pid: int
    started: int  # in the kernel's ticks; 0: it has ended
    host: str  # identifies the boot of the machine and the /dev/shm, of which each container has its own
    namespace: str  # of process numbers, which have no meaning in another namespace

    @property
    def is_alive(self) -> bool:
        """Whether the process still runs; one that is invisible from here counts as alive."""
        return (self.host, self.namespace) != (_host_identity(), _process_namespace()) or self.started == _start_time(
            self.pid
        )


def this_process() -> Process:
    return Process(os.getpid(), _start_time(os.getpid()), _host_identity(), _process_namespace())


def free_bytes() -> int:
    """Returns the free bytes in /dev/shm; 0 if there is none."""
    try:
        found = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def create(size: int) -> tuple[Path, mmap.mmap]:
    """Creates and maps a file of `size` bytes, all zero, and returns its path too. Removes files of killed jobs.

    Raises OSError if no directory has enough space, so that accesses to the memory never fail.
    """
    problem: OSError | None = None
    for directory in (_SHARED_MEMORY, Path(tempfile.gettempdir())):
        _remove_leftovers(directory)
        owner = this_process()
        path = (
            directory
            / f"{_PREFIX}{_namespace_number(owner.namespace)}-{owner.pid}-{owner.started}-{secrets.token_hex(8)}"
        )
        try:
            return path, _map_file(path, size, os.O_CREAT | os.O_EXCL)
        except OSError as error:
            problem = error
            path.unlink(missing_ok=True)
    raise OSError(f"no room for {size >> 20} MiB of shared memory: {problem}")


def attach(path: Path, size: int) -> mmap.mmap:
    """Maps a file that `create` made in another process of this user. Raises OSError for any other file.

    The path comes from a store into which strangers may write, so the file's owner, mode, size and name are checked.
    """
    about = path.lstat()
    mode, owner = about.st_mode, about.st_uid
    if (mode, owner, about.st_size) != (stat.S_IFREG | _MODE, os.geteuid(), size) or not path.name.startswith(_PREFIX):
        raise OSError(f"{path} is not shared memory of this job")
    return _map_file(path, size, 0)


def _map_file(path: Path, size: int, flags: int) -> mmap.mmap:
    """Maps a file. With `flags` it is created, with all its space. Raises OSError, and may leave a new file."""
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, _MODE)
    try:
        if flags:
            os.posix_fallocate(fd, 0, size)  # a full disk is an error here, and a SIGBUS later
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)


def _remove_leftovers(directory: Path) -> None:
    """Removes this user's files of processes in this namespace that ended before all had mapped them."""
    for path in directory.glob(f"{_PREFIX}{_namespace_number(_process_namespace())}-*-*-*"):
        _, pid, started, _ = path.name[len(_PREFIX) :].split("-", 3)
        try:
            if path.stat().st_uid == os.getuid() and _start_time(int(pid)) != int(started):
                path.unlink(missing_ok=True)
        except (OSError, ValueError):
            continue  # another user's, or already removed


def _start_time(pid: int) -> int:
    """Returns when a process started, in the kernel's ticks; 0 if it has ended or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in ("Z", "X") else int(fields[19])


def _namespace_number(namespace: str) -> str:
    return "".join(filter(str.isdigit, namespace)) or "0"


def _host_identity() -> str:
    """Identifies processes that can share memory: by SMDDP_HOST and the kernel's boot number, or the host's name."""
    named = os.environ.get("SMDDP_HOST", "")
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{named}:{boot}:{_SHARED_MEMORY.stat().st_dev}"
    except OSError:
        return f"{named}:{socket.gethostname()}"


def _process_namespace() -> str:
    """Identifies the namespace of process numbers; empty if it is not known."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""
