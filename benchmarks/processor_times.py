"""The processor time of each program that ends meanwhile, as Linux reports it (taskstats). It needs root.

The clock of the processes themselves does not count the start of a program, and /proc forgets a program that has ended.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

_GENERIC, _CONTROL, _REQUEST, _ERROR = 16, 16, 5, 2  # the protocol, its family of families, flags, an answer
_GET_FAMILY, _FAMILY_ID, _FAMILY_NAME = 3, 1, 2
_REGISTER, _CPUS = 1, 3  # the request for reports, and its attribute
_OF_TASK, _STATISTICS = 4, 3  # attributes of a report, the second within the first
_HEADER, _ATTRIBUTE = struct.Struct("=IHHIIBBH"), struct.Struct("=HH")
_RUN, _NAME, _IDS = 72, slice(80, 112), 128  # places in the statistics
_BUFFER = 64 << 20  # bytes, for the reports of some ten thousand programs


class Ended(NamedTuple):
    """A thread of a program that has ended."""

    name: str
    pid: int  # of the thread
    parent: int  # process
    seconds: float  # of the processors


class Reports:
    """The threads that have ended since `listen` began."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener

    def read(self) -> list[Ended]:
        """Returns the threads that have ended since the last call. Raises OSError if the buffer was too small."""
        found: list[Ended] = []
        while True:
            try:
                message = self._listener.recv(1 << 16)
            except BlockingIOError:
                return found
            for kind, content in _split(message[_HEADER.size :]):
                if kind == _OF_TASK:
                    found.append(_parse(dict(_split(content))[_STATISTICS]))


@contextmanager
def listen() -> Iterator[Reports]:
    """Listens for the ends of all programs of this machine. Raises OSError if the kernel has no such reports."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _GENERIC) as listener:
        listener.setsockopt(socket.SOL_SOCKET, getattr(socket, "SO_RCVBUFFORCE", 33), _BUFFER)
        listener.bind((0, 0))
        _send(listener, _CONTROL, _GET_FAMILY, _FAMILY_NAME, b"TASKSTATS\0")
        family = struct.unpack("=H", dict(_split(_receive(listener)))[_FAMILY_ID])[0]
        _receive(listener)  # that the request was taken
        _send(listener, family, _REGISTER, _CPUS, f"0-{(os.cpu_count() or 1) - 1}\0".encode())
        _receive(listener)
        listener.setblocking(False)
        yield Reports(listener)


def sum_by_program(ended: list[Ended], roots: Mapping[int, str]) -> dict[tuple[str, str], float]:
    """Sums the seconds of all descendants of some processes, and of these, by the value of the root and the name."""
    groups = dict(roots)
    missing, before = ended, -1
    while len(missing) != before:
        before = len(missing)
        for each in missing:
            if each.parent in groups and each.pid not in groups:
                groups[each.pid] = groups[each.parent]
        missing = [each for each in missing if each.pid not in groups]
    sums: dict[tuple[str, str], float] = {}
    for each in ended:
        if each.pid in groups:
            key = (groups[each.pid], each.name)
            sums[key] = sums.get(key, 0) + each.seconds
    return sums


def _send(listener: socket.socket, family: int, command: int, kind: int, value: bytes) -> None:
    attribute = _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind) + value + bytes(-len(value) % 4)
    listener.send(_HEADER.pack(_HEADER.size + len(attribute), family, _REQUEST, 0, 0, command, 1, 0) + attribute)


def _receive(listener: socket.socket) -> bytes:
    """Returns the attributes of an answer. Raises OSError for a refusal."""
    message = listener.recv(1 << 16)
    code = -struct.unpack_from("=i", message, 16)[0] if struct.unpack_from("=H", message, 4)[0] == _ERROR else 0
    if code:
        raise OSError(code, f"taskstats: {os.strerror(code)}. Fix: a kernel with CONFIG_TASKSTATS")
    return message[_HEADER.size :]


def _split(attributes: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields the number and the value of each attribute."""
    while len(attributes) >= _ATTRIBUTE.size:
        size, kind = _ATTRIBUTE.unpack_from(attributes)
        yield kind, attributes[_ATTRIBUTE.size : size]
        attributes = attributes[size + -size % 4 :]


def _parse(statistics: bytes) -> Ended:
    """Reads `struct taskstats`: the part that its version 1 had."""
    name = statistics[_NAME].rstrip(b"\0").split(b"\0")[0].decode(errors="replace")
    pid, parent = struct.unpack_from("=II", statistics, _IDS)
    nanoseconds = struct.unpack_from("=Q", statistics, _RUN)[0]  # its other times are whole ticks of 4 ms
    return Ended(name, pid, parent, nanoseconds / 1e9)
