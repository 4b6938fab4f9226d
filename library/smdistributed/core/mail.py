"""Messages between any two ranks of a job, over TCP: a head and any number of bodies, delivered as they come.

`torch.distributed` and MPI ask the receiver for the size and the order of what comes; here a thread for each peer takes
whatever arrives and hands it over. Connections are one-way, and known by a secret of the job: what is delivered is
trusted as other messages of the job are (bodies and heads are unpickled by their readers).
"""

from __future__ import annotations

import hmac
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

_HELLO = struct.Struct("!16sI")
_SIZES = struct.Struct("!II")
_SECRET_BYTES = 16
_CONNECT_SECONDS = 60.0
_BUFFER_BYTES = 4 << 20
_MOST_PARTS = 512  # of one sendmsg; Linux takes 1,024

Deliver = Callable[[int, bytes, "list[bytearray]"], None]
Lost = Callable[[int], None]


class Mail:
    """This rank's side. `deliver(source, head, bodies)` and `lost(source)` are called on receiving threads.

    rank: this process's number among those that exchange.
    secret: 16 bytes that all ranks of the job, and nobody else, have.
    """

    def __init__(self, rank: int, secret: bytes, deliver: Deliver, lost: Lost) -> None:
        if len(secret) != _SECRET_BYTES:
            raise ValueError(f"The secret has {len(secret)} bytes: it must have {_SECRET_BYTES}.")
        self._rank, self._secret, self._deliver, self._lost = rank, secret, deliver, lost
        self._peers: dict[int, tuple[str, int]] = {}
        self._out: dict[int, tuple[socket.socket, threading.Lock]] = {}
        self._in: list[socket.socket] = []
        self._connecting = threading.Lock()
        self._closed = False
        self._listener = socket.create_server(("", 0), backlog=1024)
        self.port: int = self._listener.getsockname()[1]
        _start(self._accept, "smp-mail-accept")

    def meet(self, peers: dict[int, tuple[str, int]]) -> None:
        """Say where the other ranks listen: a host name or address, and a port. Connections are made when needed."""
        self._peers.update(peers)

    def send(self, to: int, head: bytes, bodies: Sequence[Any] = ()) -> None:
        """Send to that rank. Each body is a buffer of bytes. Returns when the system has taken it all.

        Raises ConnectionError when the rank cannot be reached.
        """
        sock, lock = self._connection(to)
        views = [memoryview(body) for body in bodies]
        sizes = struct.pack(f"!{len(views)}Q", *(view.nbytes for view in views))
        with lock:
            _send_all(sock, [_SIZES.pack(len(head), len(views)) + sizes + head, *views])

    def close(self) -> None:
        """End all connections. The other ranks see a peer that is lost."""
        self._closed = True
        for sock in (self._listener, *(sock for sock, _ in self._out.values()), *self._in):
            with suppress(OSError):  # was not connected
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _connection(self, to: int) -> tuple[socket.socket, threading.Lock]:
        found = self._out.get(to)
        if found is None:
            with self._connecting:
                found = self._out.get(to)
                if found is None:
                    sock = socket.create_connection(self._peers[to], _CONNECT_SECONDS)
                    sock.settimeout(None)
                    _prepare(sock)
                    sock.sendall(_HELLO.pack(self._secret, self._rank))
                    found = self._out[to] = sock, threading.Lock()
        return found

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return  # closed
            _prepare(sock)
            self._in.append(sock)
            _start(self._receive, "smp-mail-receive", sock)

    def _receive(self, sock: socket.socket) -> None:
        source = None
        try:
            secret, rank = _HELLO.unpack(_receive_bytes(sock, _HELLO.size))
            if not hmac.compare_digest(secret, self._secret):
                sock.close()
                return
            source = rank
            while True:
                head_bytes, bodies = _SIZES.unpack(_receive_bytes(sock, _SIZES.size))
                sizes = struct.unpack(f"!{bodies}Q", _receive_bytes(sock, 8 * bodies))
                head = bytes(_receive_bytes(sock, head_bytes))
                self._deliver(source, head, [_receive_bytes(sock, size) for size in sizes])
        except (OSError, EOFError):
            if source is not None and not self._closed:
                self._lost(source)


def own_address(towards: str) -> str:
    """The address of this host by which hosts that reach `towards` reach it, as far as its routes tell."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 1))  # sends nothing
        address: str = probe.getsockname()[0]
        return address


def _start(target: Callable[..., None], name: str, *arguments: object) -> None:
    threading.Thread(target=target, args=arguments, name=name, daemon=True).start()


def _prepare(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _send_all(sock: socket.socket, parts: list[Any]) -> None:
    views: list[memoryview] = [view for view in (memoryview(part) for part in parts) if view.nbytes]
    while views:
        sent = sock.sendmsg(views[:_MOST_PARTS])
        while sent and sent >= views[0].nbytes:
            sent -= views.pop(0).nbytes
        if sent:
            views[0] = views[0].cast("B")[sent:]


def _receive_bytes(sock: socket.socket, size: int) -> bytearray:
    buffer = bytearray(size)
    view = memoryview(buffer)
    while view.nbytes:
        received = sock.recv_into(view)
        if not received:
            raise EOFError
        view = view[received:]
    return buffer
