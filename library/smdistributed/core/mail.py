"""Messages between any two ranks of a job, over TCP: a head and any number of bodies, delivered as they come.

`torch.distributed` and MPI ask the receiver for the size and the order of what comes; here whatever arrives is handed
over. Waking a thread costs more than a message does, so that no thread is kept for receiving: a thread that waits for
an answer receives meanwhile, for all others too. A reserve thread does so when all others are busy. Receiving never
waits for one connection: a stranger, or a rank that stops in the middle of a message, keeps the others from nothing.

Who connects and who listens prove to each other that they have the job's key (see `handshake`), and between hosts each
head shows that it is theirs (see `frames`): heads may be pickles. Messages go one way on a connection. A rank that is
called calls back, so that each notices when the other ends, or its host is lost.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from smdistributed.core.frames import FrameError, Reader, Writer
from smdistributed.core.handshake import HandshakeError, Listener, call
from smdistributed.core.sockets import LOSS_SECONDS, is_loopback, limit_acknowledgement, listen, watch_connection

SEND_SECONDS = 1800.0
_CONNECT_SECONDS = 60.0  # a process may hold the interpreter for long, and then answers late
_AGAIN_SECONDS = 0.05
_BUFFER_BYTES = 4 << 20
_READ_BYTES = 8 << 10
_LONG_BYTES, _MOST_AT_ONCE = 128 << 10, 1 << 20
_MOST_PARTS = 512  # of one sendmsg; Linux takes 1,024
_MOST_STRANGERS = 64  # connections that have not proved themselves yet
_TICK_SECONDS = 0.005

_log = logging.getLogger(__name__)

Deliver = Callable[[int, bytes, "list[bytearray]"], None]
Lost = Callable[[int], None]


class Access(NamedTuple):
    """How a rank is reached, and by whom."""

    key: bytes
    """Of the job: whoever has it is one of its ranks, and is believed."""
    address: str
    """Of this host, the only one at which the rank listens; of the loopback for all ranks, or for none."""


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

    Makes a thread. rank: this process's number among those that exchange. seconds: how long a message waits for a rank
    that takes none.
    """

    def __init__(self, rank: int, access: Access, deliver: Deliver, lost: Lost, seconds: float = SEND_SECONDS) -> None:
        self._rank, self._key, self._deliver, self._lost = rank, access.key, deliver, lost
        self._seconds, self._is_tagged = seconds, not is_loopback(access.address)
        self._peers: dict[int, tuple[str, int]] = {}
        self._out: dict[int, _Outgoing] = {}
        self._in: dict[int, _Incoming] = {}
        self._strangers: dict[int, _Incoming] = {}
        self._dialing: dict[int, threading.Lock] = {}
        self._closed = False
        self._listener = listen(access.address)
        self._listener.setblocking(False)
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
        self._dialing.update({rank: threading.Lock() for rank in peers})
        self._peers.update(peers)
        for incoming in list(self._in.values()):
            self._call_back(incoming.source)

    def send(self, to: int, head: bytes, bodies: Sequence[Any] = ()) -> None:
        """Send to that rank. Each body is a buffer of bytes. Returns when the system has taken it all.

        Raises ConnectionError when the rank cannot be reached or does not have the job's key, TimeoutError when it
        takes nothing for too long. After an error nothing more can be sent to it.
        """
        out = self._connection(to)
        views = [memoryview(body) for body in bodies]
        with out.lock:
            try:
                _send_all(out.sock, [out.writer.frame(head, views), *views])
            except BlockingIOError:
                out.end()
                raise TimeoutError(f"rank {to} has taken no message for {self._seconds:g} s") from None
            except BaseException:  # interrupts, too: the rest of the message would be missing
                out.end()
                raise

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
        for outgoing in list(self._out.values()):
            outgoing.close()
        for incoming in list(self._in.values()):
            incoming.close()
        self._listener.close()

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
        """Wait for something to come, and deliver what is complete."""
        for descriptor, _ in self._epoll.poll():
            if descriptor == self._listener.fileno():
                self._accept()
            elif descriptor == self._bell:
                with suppress(BlockingIOError):
                    os.read(descriptor, _READ_BYTES)
            elif descriptor in self._in:  # and has not ended a moment ago
                self._take(self._in[descriptor])

    def _accept(self) -> None:
        """Let a connection in, as a stranger; of too many, the oldest goes."""
        try:
            sock, _ = self._listener.accept()
            sock.setblocking(False)
            _prepare(sock)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._drop_stranger()
                time.sleep(_TICK_SECONDS)  # it would come again at once
            return  # it has gone again, or `close` was called
        incoming = _Incoming(sock, Listener(self._key, self._rank))
        self._in[sock.fileno()] = self._strangers[sock.fileno()] = incoming
        self._epoll.register(sock.fileno(), select.EPOLLIN)
        if len(self._strangers) > _MOST_STRANGERS:
            self._drop_stranger()

    def _drop_stranger(self) -> None:
        oldest = next(iter(self._strangers.values()), None)
        if oldest is not None:
            self._forget(oldest)

    def _take(self, incoming: _Incoming) -> None:
        """Deliver what has come on a connection, without waiting for more."""
        reader, ended = incoming.reader, None
        try:
            if reader is None:
                self._greet(incoming)
                return
            incoming.receive(reader)
        except BlockingIOError:
            return
        except (OSError, EOFError) as error:
            ended = error
        for head, bodies in reader.take() if reader else ():
            self._deliver(incoming.source, head, bodies)
        if ended is not None:
            self._end(incoming, ended)

    def _end(self, incoming: _Incoming, error: Exception) -> None:
        """A connection has ended: a rank is lost, unless it was a stranger's."""
        if isinstance(error, FrameError):
            _log.error("smp: rank %d ends its connection from rank %d: %s", self._rank, incoming.source, error)
        self._forget(incoming)
        if incoming.reader is not None and not self._closed:
            out = self._out.get(incoming.source)
            if out is not None:  # nobody waits any more until it takes a message
                out.end()
            self._lost(incoming.source)

    def _greet(self, incoming: _Incoming) -> None:
        """Go on with the handshake of a stranger."""
        data = incoming.sock.recv(incoming.handshake.wanted)
        if not data:
            raise EOFError
        reply = incoming.handshake.feed(data)
        if reply and incoming.sock.send(reply) < len(reply):
            raise HandshakeError("a stranger does not read")
        if incoming.handshake.session:
            self._strangers.pop(incoming.sock.fileno(), None)
            incoming.source, incoming.reader = incoming.handshake.caller, Reader(self._tags(incoming.handshake.session))
            self._call_back(incoming.source)

    def _call_back(self, source: int) -> None:
        """Connect to a rank that has connected to this one, on a thread: a lost host is noticed on an idle connection.

        One that waits for acknowledgements is not idle, and this rank may have nothing to send.
        """
        if source in self._peers and source not in self._out:
            threading.Thread(target=self._try_connection, args=(source,), name="smp-call-back", daemon=True).start()

    def _try_connection(self, to: int) -> None:
        with suppress(OSError):  # gone again: its own connection tells
            self._connection(to)

    def _forget(self, incoming: _Incoming) -> None:
        descriptor = incoming.sock.fileno()
        self._in.pop(descriptor, None)
        self._strangers.pop(descriptor, None)
        with suppress(OSError, ValueError):  # `close` has closed it meanwhile: its descriptor is -1
            self._epoll.unregister(descriptor)
        incoming.sock.close()

    def _ring(self) -> None:
        """Have the thread that receives look again."""
        with suppress(BlockingIOError):  # full of rings
            os.write(self._ringer, b"!")

    def _connection(self, to: int) -> _Outgoing:
        """The connection to a rank, which is made if there is none."""
        found = self._out.get(to)
        if found is None:
            with self._dialing[to]:
                found = self._out.get(to)
                if found is None:
                    found = self._out[to] = self._dial(to)
                    if self._closed:  # meanwhile: the other rank would not see the end
                        found.close()
        return found

    def _dial(self, to: int) -> _Outgoing:
        """Connect to a rank. Raises ConnectionError or TimeoutError."""
        deadline = time.monotonic() + _CONNECT_SECONDS
        while True:
            sock = socket.create_connection(self._peers[to], LOSS_SECONDS)  # the kernel there answers, not the process
            try:
                return self._introduce(sock, to, deadline)
            except HandshakeError as error:
                sock.close()
                host, port = self._peers[to]
                raise HandshakeError(
                    f"Rank {to}, at {host}:{port}, does not have this job's key: {error}. "
                    "Fix: give all ranks the same SMDDP_JOB_SECRET."
                ) from None
            except (EOFError, ConnectionResetError, BrokenPipeError):  # too many strangers called there
                sock.close()
                if time.monotonic() > deadline or self._closed:
                    raise ConnectionResetError(f"rank {to} ends every connection") from None
            except BaseException:
                sock.close()
                raise
            time.sleep(_AGAIN_SECONDS)

    def _introduce(self, sock: socket.socket, to: int, deadline: float) -> _Outgoing:
        _prepare(sock)
        limit_acknowledgement(sock, LOSS_SECONDS)
        session = call(sock, self._key, self._rank, to, deadline)
        limit_acknowledgement(sock, 0)
        sock.settimeout(None)
        seconds = struct.pack("ll", int(self._seconds), int(self._seconds % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
        return _Outgoing(sock, Writer(self._tags(session)))

    def _tags(self, session: bytes) -> bytes:
        """The key for tags: none if only this host reaches the ranks, all of which listen alike then."""
        return session if self._is_tagged else b""


class _Outgoing:
    """A connection that this rank has made."""

    def __init__(self, sock: socket.socket, writer: Writer) -> None:
        self.sock, self.writer, self.lock = sock, writer, threading.Lock()

    def end(self) -> None:
        """End it, also for a thread that sends."""
        with suppress(OSError):  # has ended already
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End it, and let go of the socket."""
        self.end()
        self.sock.close()


class _Incoming:
    """A connection that another rank, or a stranger, has made."""

    def __init__(self, sock: socket.socket, handshake: Listener) -> None:
        self.sock, self.handshake = sock, handshake
        self.source = -1
        self.reader: Reader | None = None
        self._low = 1

    def receive(self, reader: Reader) -> None:
        """Give the reader what has come.

        Raises BlockingIOError if nothing has come, EOFError at the end of the connection, FrameError for what is no
        message of the other side.
        """
        count = self.sock.recv_into(reader.buffer())
        if not count:
            raise EOFError
        reader.advance(count)
        if reader.missing >= _READ_BYTES:  # of a body: most often the rest is there
            with suppress(BlockingIOError):
                reader.advance(self.sock.recv_into(reader.buffer()))
        low = min(reader.missing, _MOST_AT_ONCE) if reader.missing >= _LONG_BYTES else 1
        if low != self._low:  # of a long body, no piece is worth waking for
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low)
            self._low = low

    def close(self) -> None:
        """End it, and let go of the socket."""
        with suppress(OSError):  # has ended already
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


def _prepare(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    watch_connection(sock)


def _send_all(sock: socket.socket, parts: list[Any]) -> None:
    views: list[memoryview] = [view for view in (memoryview(part) for part in parts) if view.nbytes]
    while views:
        sent = sock.sendmsg(views[:_MOST_PARTS])
        while sent and sent >= views[0].nbytes:
            sent -= views.pop(0).nbytes
        if sent:
            views[0] = views[0].cast("B")[sent:]
