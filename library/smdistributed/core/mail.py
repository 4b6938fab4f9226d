"""Messages between any two ranks of a job, over TCP: a head and any number of bodies, delivered as they come.

`torch.distributed` and MPI ask the receiver for the size and the order of what comes; here whatever arrives is handed
over. Waking a thread costs more than a message does, so that no thread is kept for receiving: a thread that waits for
an answer receives meanwhile, for all others too. A reserve thread does so when all others are busy.

Connections are one-way, and known by a secret of the job: what is delivered is trusted as other messages of the job
are (bodies and heads are unpickled by their readers).
"""

from __future__ import annotations

import hmac
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

_HELLO = struct.Struct("!16sI")
_SIZES = struct.Struct("!II")
_SECRET_BYTES = 16
_CONNECT_SECONDS = 60.0
_BUFFER_BYTES = 4 << 20
_READ_BYTES = 8 << 10
_MOST_PARTS = 512  # of one sendmsg; Linux takes 1,024
_TICK_SECONDS = 0.005

Deliver = Callable[[int, bytes, "list[bytearray]"], None]
Lost = Callable[[int], None]


class Waiter:
    """What a thread waits for: see `Mail.wait` and `Mail.wake`. Used once.

    receives: whether the thread receives meanwhile. Not so where its wake comes from another thread that waits itself,
    and would have to be woken by this one.
    """

    __slots__ = ("is_ready", "lock", "receives")

    def __init__(self, receives: bool = True) -> None:
        self.is_ready, self.receives = False, receives
        self.lock = threading.Lock()
        self.lock.acquire()


class Mail:
    """This rank's side. `deliver(source, head, bodies)` and `lost(source)` are called on any thread, one at a time.

    rank: this process's number among those that exchange.
    secret: 16 bytes that all ranks of the job, and nobody else, have.
    """

    def __init__(self, rank: int, secret: bytes, deliver: Deliver, lost: Lost) -> None:
        if len(secret) != _SECRET_BYTES:
            raise ValueError(f"The secret has {len(secret)} bytes: it must have {_SECRET_BYTES}.")
        self._rank, self._secret, self._deliver, self._lost = rank, secret, deliver, lost
        self._peers: dict[int, tuple[str, int]] = {}
        self._out: dict[int, tuple[socket.socket, threading.Lock]] = {}
        self._in: dict[int, _Incoming] = {}
        self._connecting = threading.Lock()
        self._closed = False
        self._listener = socket.create_server(("", 0), backlog=1024)
        self.port: int = self._listener.getsockname()[1]
        self._bell, self._ringer = os.pipe()
        for end in (self._bell, self._ringer):
            os.set_blocking(end, False)
        self._epoll = select.epoll()
        self._epoll.register(self._listener.fileno(), select.EPOLLIN)
        self._epoll.register(self._bell, select.EPOLLIN)
        self._receiving = threading.Lock()
        self._receiver: Waiter | None = None
        self._followers: list[Waiter] = []
        self._woken = 0
        threading.Thread(target=self._reserve, name="smp-mail", daemon=True).start()

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

    def wait(self, waiter: Waiter) -> None:
        """Wait until somebody calls `wake` with this, and receive meanwhile if no other thread does."""
        if not waiter.receives:
            waiter.lock.acquire()
        while not waiter.is_ready:
            if self._receiving.acquire(blocking=False):
                self._receive_until(waiter)
                continue
            self._followers.append(waiter)
            if self._receiving.acquire(blocking=False):  # whoever received has left in between
                with suppress(ValueError):
                    self._followers.remove(waiter)
                self._receive_until(waiter)
                continue
            waiter.lock.acquire()

    def wake(self, waiter: Waiter) -> None:
        """Let the thread that waits with this go on."""
        waiter.is_ready = True
        self._woken += 1
        with suppress(RuntimeError):  # it has been asked to receive
            waiter.lock.release()
        if self._receiver is waiter:
            self._ring()

    def close(self) -> None:
        """End all connections. The other ranks see a peer that is lost."""
        self._closed = True
        self._ring()
        connected = [*(sock for sock, _ in self._out.values()), *(incoming.sock for incoming in self._in.values())]
        for sock in (self._listener, *connected):
            with suppress(OSError):  # was not connected
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    # --- receiving, on one thread at a time

    def _receive_until(self, waiter: Waiter) -> None:
        """With the right to receive: do so until this is ready; then another may."""
        try:
            self._receiver = waiter
            while not waiter.is_ready:
                self._poll()
        finally:
            self._receiver = None
            self._receiving.release()
        while self._followers:
            follower = self._followers.pop()
            if not follower.is_ready:
                with suppress(RuntimeError):
                    follower.lock.release()
                return

    def _reserve(self) -> None:
        """Receive while nobody does; leave it to those who wait as soon as one of them has been woken."""
        while not self._closed:
            if self._receiving.acquire(blocking=False):
                woken = self._woken
                try:
                    while woken == self._woken and not self._closed:
                        self._poll()
                finally:
                    self._receiving.release()
            time.sleep(_TICK_SECONDS)

    def _poll(self) -> None:
        """Wait for something to come, and deliver it."""
        for descriptor, _ in self._epoll.poll():
            if descriptor == self._listener.fileno():
                self._accept()
            elif descriptor == self._bell:
                with suppress(BlockingIOError):
                    os.read(descriptor, _READ_BYTES)
            else:
                self._take(self._in[descriptor])

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            sock, _ = self._listener.accept()
            _prepare(sock)
            self._in[sock.fileno()] = _Incoming(sock)
            self._epoll.register(sock.fileno(), select.EPOLLIN)

    def _take(self, incoming: _Incoming) -> None:
        """Deliver all that a connection has."""
        try:
            if incoming.source is None:
                secret, source = _HELLO.unpack(incoming.read(_HELLO.size))
                if not hmac.compare_digest(secret, self._secret):
                    self._forget(incoming)
                    return
                incoming.source = source
            else:
                self._take_message(incoming, incoming.source)
            while incoming.has_more() and incoming.source is not None:
                self._take_message(incoming, incoming.source)
        except (OSError, EOFError):
            self._forget(incoming)
            if incoming.source is not None and not self._closed:
                self._lost(incoming.source)

    def _take_message(self, incoming: _Incoming, source: int) -> None:
        head_bytes, bodies = _SIZES.unpack(incoming.read(_SIZES.size))
        sizes = struct.unpack(f"!{bodies}Q", incoming.read(8 * bodies))
        head = bytes(incoming.read(head_bytes))
        self._deliver(source, head, [incoming.read(size) for size in sizes])

    def _forget(self, incoming: _Incoming) -> None:
        descriptor = incoming.sock.fileno()
        self._in.pop(descriptor, None)
        with suppress(OSError, ValueError):  # `close` has closed it meanwhile: its descriptor is -1
            self._epoll.unregister(descriptor)
        incoming.sock.close()

    def _ring(self) -> None:
        """Have the thread that receives look again."""
        with suppress(BlockingIOError):  # full of rings
            os.write(self._ringer, b"!")

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


class _Incoming:
    """A connection that another rank has made, and what was read of it ahead."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.source: int | None = None
        self._ahead = b""
        self._at = 0

    def has_more(self) -> bool:
        return self._at < len(self._ahead)

    def read(self, size: int) -> bytearray:
        """The next bytes. Raises EOFError at the end of the connection."""
        buffer = bytearray(size)
        view = memoryview(buffer)
        while view.nbytes:
            if self._at == len(self._ahead) and view.nbytes < _READ_BYTES:
                self._ahead, self._at = self.sock.recv(_READ_BYTES), 0
                if not self._ahead:
                    raise EOFError
            count = min(view.nbytes, len(self._ahead) - self._at)
            if count:
                view[:count] = self._ahead[self._at : self._at + count]
                self._at += count
            else:
                count = self.sock.recv_into(view, 0, socket.MSG_WAITALL)
                if not count:
                    raise EOFError
            view = view[count:]
        return buffer


def own_address(towards: str) -> str:
    """The address of this host by which hosts that reach `towards` reach it, as far as its routes tell."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 1))  # sends nothing
        address: str = probe.getsockname()[0]
        return address


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
