"""Messages between any two ranks of a job, over TCP: a head and any number of bodies, delivered as they arrive.

`torch.distributed` and MPI ask the receiver for the size and the order of messages. Here every message is delivered.
Waking a thread costs more than a message does. So no thread is kept for receiving: a thread that waits for an answer
receives messages for all threads meanwhile. A reserve thread receives if all others are busy. Receiving never waits for
one connection. A peer that is not authenticated, or stops in the middle of a message, delays no rank.

Both sides of a connection prove that they have the job's key (see `handshake`). Between hosts each head has a tag (see
`frames`), because heads may be pickles. Messages go one way on a connection. A rank that gets a connection connects
back, so that each notices when the other ends, or its host is lost.
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

from smdistributed.core.frames import FrameError, FrameReader, FrameWriter
from smdistributed.core.handshake import HandshakeError, Responder, initiate_handshake
from smdistributed.core.sockets import LOSS_SECONDS, is_loopback, listen, prepare_connection, set_user_timeout

SEND_SECONDS = 1800.0
_CONNECT_SECONDS = 60.0  # a process that holds the interpreter lock answers late
_RETRY_SECONDS = 0.05
_BUFFER_BYTES = 4 << 20
_READ_BYTES = 8 << 10
_LONG_BODY_BYTES, _MOST_LOW_WATER_BYTES = 128 << 10, 1 << 20
_MOST_PARTS = 512  # of one sendmsg; Linux takes 1,024
_MOST_UNAUTHENTICATED = 64  # connections
_IDLE_SECONDS = 0.005

_log = logging.getLogger(__name__)

Deliver = Callable[[int, bytes, "list[bytearray]"], None]
Lost = Callable[[int], None]


class Access(NamedTuple):
    """The address at which a rank listens, and the key that peers must have."""

    key: bytes
    """The job's key. A process that has it is trusted as one of its ranks."""
    address: str
    """The only address at which the rank listens. Either all ranks listen on the loopback, or none does."""


class Waiter:
    """One wait of a thread: see `Transport.wait` and `Transport.wake`. Used once.

    receives: whether the thread receives messages meanwhile. It must not if another thread, which also waits, wakes it:
    this thread would then have to wake that one first.
    """

    __slots__ = ("is_ready", "lock", "receives")

    def __init__(self, receives: bool = True) -> None:
        self.is_ready, self.receives = False, receives
        self.lock = threading.Lock()
        self.lock.acquire()


class Transport:
    """This rank's connections to all others. Starts a thread.

    `deliver(source, head, bodies)` is called for each message, on any thread, one at a time. `lost(source)` is called
    when the connection from a rank has ended. A message waits `seconds` for a rank that takes none.
    """

    def __init__(self, rank: int, access: Access, deliver: Deliver, lost: Lost, seconds: float = SEND_SECONDS) -> None:
        self._rank, self._key, self._deliver, self._lost = rank, access.key, deliver, lost
        self._seconds, self._is_tagged = seconds, not is_loopback(access.address)
        self._peers: dict[int, tuple[str, int]] = {}
        self._out: dict[int, _Outgoing] = {}
        self._in: dict[int, _Incoming] = {}
        self._unauthenticated: dict[int, _Incoming] = {}
        self._connect_locks: dict[int, threading.Lock] = {}
        self._closed = False
        self._listener = listen(access.address)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._wakeup_fd, self._wakeup_writer = os.pipe()
        for end in (self._wakeup_fd, self._wakeup_writer):
            os.set_blocking(end, False)
        self._epoll = select.epoll()
        self._epoll.register(self._listener.fileno(), select.EPOLLIN)
        self._epoll.register(self._wakeup_fd, select.EPOLLIN)
        self._receiving = threading.Lock()
        self._receiver: Waiter | None = None
        self._followers: list[Waiter] = []
        self._woken = 0
        threading.Thread(target=self._receive_when_idle, name="smp-transport", daemon=True).start()

    def set_peers(self, peers: dict[int, tuple[str, int]]) -> None:
        """Sets hosts and ports of the other ranks. Threads connect back to ranks that have connected already."""
        self._connect_locks.update({rank: threading.Lock() for rank in peers})
        self._peers.update(peers)
        for incoming in list(self._in.values()):
            self._connect_back(incoming.source)

    def send(self, to: int, head: bytes, bodies: Sequence[Any] = ()) -> None:
        """Returns when the kernel has taken all of the message. After an error, no more can be sent.

        Raises ConnectionError if the rank cannot be reached, or does not have the job's key. Raises TimeoutError if it
        takes nothing for too long.
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
        """Waits for `wake`. If the waiter may receive, this thread receives for all threads, if no other does."""
        if not waiter.receives:
            waiter.lock.acquire()
        while not waiter.is_ready:
            if self._receiving.acquire(blocking=False):
                self._receive_until(waiter)
                continue
            self._followers.append(waiter)
            if self._receiving.acquire(blocking=False):  # the receiving thread has stopped in between
                with suppress(ValueError):
                    self._followers.remove(waiter)
                self._receive_until(waiter)
                continue
            waiter.lock.acquire()

    def wake(self, waiter: Waiter) -> None:
        """Wakes the thread that waits with this, also if it receives messages. If it does not wait yet, it won't."""
        waiter.is_ready = True
        self._woken += 1
        with suppress(RuntimeError):  # it has been woken to receive
            waiter.lock.release()
        if self._receiver is waiter:
            self._interrupt_poll()

    def close(self) -> None:
        """Closes all connections and stops to listen; the thread ends. To the other ranks this rank is lost."""
        self._closed = True
        self._interrupt_poll()
        for outgoing in list(self._out.values()):
            outgoing.close()
        for incoming in list(self._in.values()):
            incoming.close()
        self._listener.close()

    # --- receiving, on one thread at a time

    def _receive_until(self, waiter: Waiter) -> None:
        """Receives until this waiter is ready, and lets another thread go on then. The caller holds `_receiving`."""
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

    def _receive_when_idle(self) -> None:
        """Thread: receives while no other thread does. It stops when a waiter is woken, which may then receive."""
        while not self._closed:
            if self._receiving.acquire(blocking=False):
                woken = self._woken
                try:
                    while woken == self._woken and not self._closed:
                        self._poll()
                finally:
                    self._receiving.release()
            time.sleep(_IDLE_SECONDS)

    def _poll(self) -> None:
        """Waits for the next event: a connection, messages to deliver, or `_interrupt_poll`."""
        for descriptor, _ in self._epoll.poll():
            if descriptor == self._listener.fileno():
                self._accept()
            elif descriptor == self._wakeup_fd:
                with suppress(BlockingIOError):
                    os.read(descriptor, _READ_BYTES)
            elif descriptor in self._in:  # and has not ended a moment ago
                self._read_from(self._in[descriptor])

    def _accept(self) -> None:
        """Accepts a connection, to be authenticated. Of too many, or if files are used up, the oldest is closed."""
        try:
            sock, _ = self._listener.accept()
            sock.setblocking(False)
            _prepare(sock)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._drop_oldest_unauthenticated()
                time.sleep(_IDLE_SECONDS)  # the same event would come again at once
            return  # the peer has closed it again, or `close` was called
        incoming = _Incoming(sock, Responder(self._key, self._rank))
        self._in[sock.fileno()] = self._unauthenticated[sock.fileno()] = incoming
        self._epoll.register(sock.fileno(), select.EPOLLIN)
        if len(self._unauthenticated) > _MOST_UNAUTHENTICATED:
            self._drop_oldest_unauthenticated()

    def _drop_oldest_unauthenticated(self) -> None:
        oldest = next(iter(self._unauthenticated.values()), None)
        if oldest is not None:
            self._close_incoming(oldest)

    def _read_from(self, incoming: _Incoming) -> None:
        """Delivers the messages that have arrived, or continues the handshake. Does not wait for more."""
        reader, ended = incoming.reader, None
        try:
            if reader is None:
                self._continue_handshake(incoming)
                return
            incoming.receive(reader)
        except BlockingIOError:
            return
        except (OSError, EOFError) as error:
            ended = error
        for head, bodies in reader.take() if reader else ():
            self._deliver(incoming.source, head, bodies)
        if ended is not None:
            self._connection_ended(incoming, ended)

    def _connection_ended(self, incoming: _Incoming, error: Exception) -> None:
        """Reports its rank as lost, if it was authenticated and before `close`. Logs a damaged message."""
        if isinstance(error, FrameError):
            _log.error("smp: rank %d ends its connection from rank %d: %s", self._rank, incoming.source, error)
        self._close_incoming(incoming)
        if incoming.reader is not None and not self._closed:
            out = self._out.get(incoming.source)
            if out is not None:  # so that no thread waits any more to send to it
                out.end()
            self._lost(incoming.source)

    def _continue_handshake(self, incoming: _Incoming) -> None:
        """Raises EOFError, OSError or HandshakeError. At its end, the connection gets a reader."""
        data = incoming.sock.recv(incoming.handshake.missing_bytes)
        if not data:
            raise EOFError
        reply = incoming.handshake.feed(data)
        if reply and incoming.sock.send(reply) < len(reply):
            raise HandshakeError("the peer does not read")
        if incoming.handshake.session:
            self._unauthenticated.pop(incoming.sock.fileno(), None)
            incoming.source, incoming.reader = (
                incoming.handshake.initiator,
                FrameReader(self._tag_key(incoming.handshake.session)),
            )
            if incoming.source in self._out:  # a loss ends this idle connection; a full buffer must not
                set_user_timeout(self._out[incoming.source].sock, 0)
            self._connect_back(incoming.source)

    def _connect_back(self, source: int) -> None:
        """Connects, on a new thread, to a rank that has connected to this one.

        A lost host is noticed on an idle connection. One that waits for acknowledgements is not idle.
        """
        if source in self._peers and source not in self._out:
            threading.Thread(target=self._try_to_connect, args=(source,), name="smp-connect-back", daemon=True).start()

    def _try_to_connect(self, to: int) -> None:
        """Thread: connects to a rank. Errors are ignored: its own connection ends too, and is reported."""
        with suppress(OSError):  # its own connection ends too, and is reported
            self._connection(to)

    def _close_incoming(self, incoming: _Incoming) -> None:
        descriptor = incoming.sock.fileno()
        self._in.pop(descriptor, None)
        self._unauthenticated.pop(descriptor, None)
        with suppress(OSError, ValueError):  # `close` has closed it meanwhile: its descriptor is -1
            self._epoll.unregister(descriptor)
        incoming.sock.close()

    def _interrupt_poll(self) -> None:
        with suppress(BlockingIOError):  # the pipe is full: it returns anyway
            os.write(self._wakeup_writer, b"!")

    def _connection(self, to: int) -> _Outgoing:
        """Connects if there is no connection. Raises OSError if that fails; HandshakeError for another key."""
        found = self._out.get(to)
        if found is None:
            with self._connect_locks[to]:
                found = self._out.get(to)
                if found is None:
                    found = self._out[to] = self._connect(to)
                    if any(incoming.source == to for incoming in list(self._in.values())):
                        set_user_timeout(found.sock, 0)
                    if self._closed:  # meanwhile: the other rank must see that it ends
                        found.close()
        return found

    def _connect(self, to: int) -> _Outgoing:
        """Tries again for _CONNECT_SECONDS if the rank ends the connection. Raises OSError; HandshakeError at once."""
        deadline = time.monotonic() + _CONNECT_SECONDS
        while True:
            sock = socket.create_connection(self._peers[to], LOSS_SECONDS)  # answered by the kernel there
            try:
                return self._authenticate(sock, to, deadline)
            except HandshakeError as error:
                sock.close()
                host, port = self._peers[to]
                raise HandshakeError(
                    f"Rank {to}, at {host}:{port}, does not have this job's key: {error}. "
                    "Fix: give all ranks the same SMDDP_JOB_SECRET."
                ) from None
            except (EOFError, ConnectionResetError, BrokenPipeError):  # too many connections there
                sock.close()
                if time.monotonic() > deadline or self._closed:
                    raise ConnectionResetError(f"rank {to} ends every connection") from None
            except BaseException:
                sock.close()
                raise
            time.sleep(_RETRY_SECONDS)

    def _authenticate(self, sock: socket.socket, to: int, deadline: float) -> _Outgoing:
        """Does the handshake, and sets the limit for sending. After an error, the caller closes `sock`."""
        _prepare(sock)
        # Until the other rank connects back, data that its host does not acknowledge ends the connection.
        set_user_timeout(sock, LOSS_SECONDS)
        session = initiate_handshake(sock, self._key, self._rank, to, deadline)
        sock.settimeout(None)
        seconds = struct.pack("ll", int(self._seconds), int(self._seconds % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
        return _Outgoing(sock, FrameWriter(self._tag_key(session)))

    def _tag_key(self, session: bytes) -> bytes:
        """The key of tags: empty if all ranks listen on the loopback, which no other host reaches."""
        return session if self._is_tagged else b""


class _Outgoing:
    def __init__(self, sock: socket.socket, writer: FrameWriter) -> None:
        self.sock, self.writer, self.lock = sock, writer, threading.Lock()

    def end(self) -> None:
        """Shuts it down, also for a thread that sends."""
        with suppress(OSError):  # has ended already
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.end()
        self.sock.close()


class _Incoming:
    """A connection that another process has made; `reader` is None until it is authenticated."""

    def __init__(self, sock: socket.socket, handshake: Responder) -> None:
        self.sock, self.handshake = sock, handshake
        self.source = -1
        self.reader: FrameReader | None = None
        self._low_water_bytes = 1

    def receive(self, reader: FrameReader) -> None:
        """Raises BlockingIOError if no bytes have arrived, EOFError at the end of the connection, and FrameError."""
        count = self.sock.recv_into(reader.buffer())
        if not count:
            raise EOFError
        reader.advance(count)
        if reader.missing >= _READ_BYTES:  # of a body: most often all of it has arrived
            with suppress(BlockingIOError):
                reader.advance(self.sock.recv_into(reader.buffer()))
        low = min(reader.missing, _MOST_LOW_WATER_BYTES) if reader.missing >= _LONG_BODY_BYTES else 1
        if low != self._low_water_bytes:  # do not wake for small pieces of a long body
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low)
            self._low_water_bytes = low

    def close(self) -> None:
        with suppress(OSError):  # has ended already
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


def _prepare(sock: socket.socket) -> None:
    prepare_connection(sock)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)


def _send_all(sock: socket.socket, parts: list[Any]) -> None:
    """Sends all parts without copying them. Raises BlockingIOError if the peer takes nothing for too long."""
    views: list[memoryview] = [view for view in (memoryview(part) for part in parts) if view.nbytes]
    while views:
        sent = sock.sendmsg(views[:_MOST_PARTS])
        while sent and sent >= views[0].nbytes:
            sent -= views.pop(0).nbytes
        if sent:
            views[0] = views[0].cast("B")[sent:]
