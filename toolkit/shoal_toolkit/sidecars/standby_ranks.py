"""Forks ranks that mpirun has started and hand_over.py hands over: a part of sidecars/standby.py.

A process between the standby and each rank waits for the rank. It passes on the signals that come over the connection,
and answers with the exit code. If the connection ends, it kills the rank, which also ends with this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import struct
from collections.abc import Callable, Mapping
from typing import NamedTuple, NoReturn

from shoal_toolkit.files import list_names

_NUMBER = struct.Struct("!I")
_PEER = struct.Struct("3i")
_SET_PARENT_DEATH_SIGNAL = 1  # of prctl
_SIGNAL_CODE = 128

# Beginnings of variables that the linker, Python and the frameworks read when a process starts or imports them.
_EARLY = (
    *("LD_", "PYTHON", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "MALLOC_", "GLIBC_", "CUDA_", "NVIDIA_", "TORCH_"),
    *("PYTORCH_", "TF_", "XLA_", "NUMPY_", "NPY_", "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "XDG_", "LANG", "LC_"),
)
_LATE = ("TORCH_NCCL_",)  # read when a process group is made


class Rank(NamedTuple):
    """The state of a process that mpirun has started, for the one that becomes the rank."""

    directory: str
    cwd: str
    mask: int
    env: dict[str, str]
    streams: tuple[int, ...]
    affinity: set[int]
    group: int  # of processes


def fork_in_group() -> tuple[int, int]:
    """Forks a process into a new process group that it does not lead. A script below a shell does not lead one either.

    Therefore it can call os.setsid(). A shell that ends at once makes the group.

    Returns:
        The pid, 0 in the new process, and the group.
    """
    leader = os.posix_spawn("/bin/sh", ["sh", "-c", ":"], {}, setpgroup=0)
    pid = os.fork()
    with contextlib.suppress(OSError):  # the script has made a session already
        os.setpgid(pid, leader)
    if pid:
        os.waitpid(leader, 0)
    return pid, leader


def fork_for(connection: socket.socket, begun_with: Mapping[str, str], refuses: Callable[[Rank], bool]) -> Rank:
    """Returns in the process of a rank. The calling process, one for each connection, never returns.

    Args:
        connection: The rank's.
        begun_with: The environment of the standby before its imports.
        refuses: Whether other reasons prevent that a rank is forked.
    """
    os.setsid()  # the end of the standby, with its group, does not end the rank
    rank = _receive(connection)
    if find_early_differences(rank.env, begun_with) or refuses(rank) or not _can_watch():
        with contextlib.suppress(OSError):
            connection.sendall(b"x")
        os._exit(0)
    parent = os.getpid()
    pid, group = fork_in_group()
    if pid:
        _wait(connection, pid, group)
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    try:
        connection.sendall(b"f")  # signals come after it
    except OSError:  # the other side waits no more, and runs the command itself
        os._exit(0)
    if os.getppid() != parent:
        os._exit(_SIGNAL_CODE + signal.SIGKILL)
    connection.close()
    os.sched_setaffinity(0, rank.affinity)
    os.umask(rank.mask)
    for target, descriptor in enumerate(rank.streams):
        os.dup2(descriptor, target)
        os.close(descriptor)
    return rank._replace(group=group)


def _can_watch() -> bool:
    """Whether the end of a process can be polled: not with Python of Conda, before Linux 5.3, or in some sandboxes."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def find_early_differences(env: Mapping[str, str], ours: Mapping[str, str]) -> list[str]:
    """Returns the variables with an effect on imports that differ between a rank and the standby."""
    early = [name for name in {*env, *ours} if name.startswith(_EARLY) and not name.startswith(_LATE)]
    return sorted(name for name in early if _normalise(name, env) != _normalise(name, ours))


def _normalise(name: str, env: Mapping[str, str]) -> object:
    """Returns the value of a variable. mpirun adds the directory of its own libraries, which no framework loads."""
    if name != "LD_LIBRARY_PATH":
        return env.get(name)
    directories = filter(None, env.get(name, "").split(os.pathsep))
    return [directory for directory in directories if not list_names(directory, prefix="libopen-pal.so")]


def _receive(connection: socket.socket) -> Rank:
    header, streams, _, _ = socket.recv_fds(connection, _NUMBER.size, 3)
    data = b""
    while header and len(data) < _NUMBER.unpack(header)[0]:
        more = connection.recv(1 << 20)
        if not more:
            os._exit(0)
        data += more
    if len(streams) < 3:
        os._exit(0)
    directory, cwd, mask, *variables = data.decode("utf-8", "surrogateescape").split("\0")
    pairs = (variable.partition("=") for variable in variables)
    env = {name: value for name, _, value in pairs}
    peer, _, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return Rank(directory, cwd, int(mask), env, tuple(streams), os.sched_getaffinity(peer), 0)


def _wait(connection: socket.socket, pid: int, group: int) -> NoReturn:
    """Passes signals on to the group of a rank until it ends. Then answers with its exit code, and ends."""
    ended = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    poll.register(ended, select.POLLIN)
    while True:
        ready = [descriptor for descriptor, _ in poll.poll()]
        if ended in ready:
            _, status = os.waitpid(pid, 0)
            code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else _SIGNAL_CODE + os.WTERMSIG(status)
            with contextlib.suppress(OSError):
                connection.sendall(bytes([code]))
            os._exit(0)
        from shoal_toolkit.system.process_tree import signal_with_group  # few ranks are signalled

        numbers = connection.recv(64)
        if not numbers:
            poll.unregister(connection)
            os.kill(pid, signal.SIGKILL)  # it may be in another group
        for number in numbers or (signal.SIGKILL,):
            signal_with_group(pid, group, number)
