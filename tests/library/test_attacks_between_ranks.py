"""Attacks on the connections between ranks: the store and the transport, over sockets, by strangers and in between.

The attacker knows the protocol, not the key. None of these tests knows how messages look after the handshake.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from smdistributed.core import store as stores
from smdistributed.core.handshake import HandshakeError, initiate_handshake
from smdistributed.core.launch import Address
from smdistributed.core.store import StoreError, TcpStore
from smdistributed.modelparallel.backend import transport as transports
from smdistributed.modelparallel.backend.transport import Access, Transport

KEY, OTHER = b"k" * 32, b"o" * 32
LOOPBACK = "127.0.0.1"
HELLO_BYTES, ANSWER_BYTES, PROOF_BYTES = 44, 64, 32
CALLER_BYTES = HELLO_BYTES + PROOF_BYTES
LIMIT_S = 30.0  # usually moments
SHORT_S = 0.3

Change = Callable[[bytes], bytes]
"""Of the bytes that pass at once."""
MakeChange = Callable[[], Change]
"""Called for each connection."""


def pass_on() -> Change:
    return lambda data: data


def flip(at: int) -> Callable[[bytes, bytes], bytes]:
    """A change of one bit of a message."""

    def change(_: bytes, data: bytes) -> bytes:
        changed = bytearray(data)
        changed[at] ^= 1
        return bytes(changed)

    return change


class FlipAt:
    """Changes one bit of the byte at this place of a connection."""

    def __init__(self, at: int) -> None:
        self._left = at

    def __call__(self, data: bytes) -> bytes:
        if 0 <= self._left < len(data):
            data = flip(self._left)(b"", data)
        self._left -= len(data)
        return data


class Between:
    """A host between a caller and a listener: it records all bytes, and may change those after the handshake, or all.

    A change is called with one message of a sender that waits for each to arrive.
    """

    def __init__(self, port: int, to_listener: MakeChange, to_caller: MakeChange, changes_handshake: bool) -> None:
        self.from_caller, self.from_listener = bytearray(), bytearray()
        self._to, self._make_changes = port, (to_listener, to_caller)
        self._unchanged = (0, 0) if changes_handshake else (CALLER_BYTES, ANSWER_BYTES)
        self._listener = socket.create_server((LOOPBACK, 0))
        self.port: int = self._listener.getsockname()[1]
        self._start(self._accept_forever)

    def close(self) -> None:
        self._listener.close()

    def _start(self, body: Callable[..., None], *args: object) -> None:
        threading.Thread(target=body, args=args, daemon=True).start()

    def _accept_forever(self) -> None:
        with contextlib.suppress(OSError):  # `close`
            while True:
                caller, _ = self._listener.accept()
                listener = socket.create_connection((LOOPBACK, self._to), LIMIT_S)
                self._start(self._pass, caller, listener, self.from_caller, 0)
                self._start(self._pass, listener, caller, self.from_listener, 1)

    def _pass(self, source: socket.socket, target: socket.socket, seen: bytearray, way: int) -> None:
        """Thread: passes on the handshake, then the changed rest, until one side ends."""
        unchanged, change = self._unchanged[way], self._make_changes[way]()
        with contextlib.suppress(OSError):
            while data := source.recv(unchanged or 1 << 16):
                seen += data
                target.sendall(data if unchanged else change(data))
                unchanged = max(unchanged - len(data), 0)
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


class StoreService:
    """A store that listens, and how a rank uses it."""

    seconds = LIMIT_S

    def __init__(self) -> None:
        self._listener = socket.create_server((LOOPBACK, 0))
        self.port: int = self._listener.getsockname()[1]
        self._service = stores._Service(self._listener, KEY)
        self._store = TcpStore(Address(LOOPBACK, self.port), LIMIT_S, key=KEY)

    def use(self, port: int, key: bytes = KEY) -> None:
        """Adds to a number four times, as a rank that reaches the store at this port. Raises an error if it cannot."""
        store = TcpStore(Address(LOOPBACK, port), self.seconds, key=key)
        for _ in range(4):
            store.add("uses", 1)
        store.close()

    def count(self) -> int:
        """How many uses have reached the store."""
        return self._store.add("uses", 0)

    def close(self) -> None:
        self._store.close()


class TransportService:
    """A rank that listens as between hosts, and how another one sends to it."""

    seconds = LIMIT_S
    """How long a message may take."""

    def __init__(self) -> None:
        self.heads: list[bytes] = []
        self.lost: list[int] = []
        self._ranks = itertools.count(2)
        self._rank = Transport(1, Access(KEY, LOOPBACK), lambda _, head, __: self.heads.append(head), self.lost.append)
        self._rank.set_peers({})
        self.port = self._rank.port

    def use(self, port: int, key: bytes = KEY) -> None:
        """Sends four messages, each when the one before is there. Raises an error if it cannot, or one is missing."""
        rank = next(self._ranks)
        sender = Transport(rank, Access(key, LOOPBACK), lambda *_: None, lambda _: None)
        sender.set_peers({1: (LOOPBACK, port)})
        try:
            for number in range(4):
                before, deadline = len(self.heads), time.monotonic() + self.seconds
                sender.send(1, b"use %d" % number, [b"body"])
                while len(self.heads) == before:
                    if rank in self.lost or time.monotonic() > deadline:
                        raise ConnectionError("a message has not arrived")
                    time.sleep(0.001)
        finally:
            sender.close()

    def count(self) -> int:
        """How many messages have arrived."""
        return len(self.heads)

    def close(self) -> None:
        self._rank.close()


Service = StoreService | TransportService


@pytest.fixture(params=[StoreService, TransportService], ids=["store", "transport"])
def service(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setattr(transports, "is_loopback", lambda _: False)  # as between hosts
    monkeypatch.setattr(stores, "CONNECT_SECONDS", SHORT_S)
    monkeypatch.setattr(transports, "_CONNECT_SECONDS", SHORT_S)
    opened = request.param()
    yield opened
    opened.close()


@contextlib.contextmanager
def between(
    service: Service,
    to_listener: MakeChange = pass_on,
    to_caller: MakeChange = pass_on,
    changes_handshake: bool = False,
) -> Iterator[Between]:
    host = Between(service.port, to_listener, to_caller, changes_handshake)
    yield host
    host.close()


def end(sock: socket.socket, data: bytes = b"") -> bytes:
    """What the other side sends before it ends the connection, if this one sends the data as its last."""
    sock.settimeout(LIMIT_S)
    found = b""
    with contextlib.suppress(OSError):  # it has ended the connection already
        sock.sendall(data)
    with contextlib.suppress(ConnectionResetError):
        while received := sock.recv(4096):
            found += received
    return found


def stranger(service: Service) -> socket.socket:
    return socket.create_connection((LOOPBACK, service.port), LIMIT_S)


def read(sock: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        found += sock.recv(size - len(found)) or pytest.fail(f"the connection ended after {len(found)} bytes")
    return found


def recorded_use(service: Service) -> Between:
    """What a host between the two sees when a rank uses the service."""
    with between(service) as host:
        service.use(host.port)
    return host


def test_a_host_that_passes_on_all_bytes_is_no_obstacle(service: Service) -> None:
    """Shows that the attacks below fail for what they change."""
    assert service.count() == 0
    recorded_use(service)
    assert service.count() == 4


def test_a_rank_with_another_key_changes_nothing(service: Service) -> None:
    with pytest.raises((StoreError, HandshakeError), match=r"another (key|secret)"):
        service.use(service.port, OTHER)
    assert service.count() == 0


def test_a_recorded_connection_cannot_be_replayed(service: Service) -> None:
    host = recorded_use(service)
    with stranger(service) as again:
        assert len(end(again, bytes(host.from_caller))) == ANSWER_BYTES
    assert service.count() == 4


def test_a_recorded_proof_does_not_answer_a_new_nonce(service: Service) -> None:
    host = recorded_use(service)
    with stranger(service) as again:
        again.sendall(host.from_caller[:HELLO_BYTES])
        assert read(again, ANSWER_BYTES) != host.from_listener[:ANSWER_BYTES]
        assert end(again, bytes(host.from_caller[HELLO_BYTES:CALLER_BYTES])) == b""


def test_a_listeners_own_proof_is_refused_when_it_is_sent_back(service: Service) -> None:
    hello = bytes(recorded_use(service).from_caller[:HELLO_BYTES])
    with stranger(service) as reflecting:
        reflecting.sendall(hello)
        assert end(reflecting, read(reflecting, ANSWER_BYTES)[-PROOF_BYTES:]) == b""


@pytest.mark.parametrize("size", [1, 7, HELLO_BYTES - 1, HELLO_BYTES, CALLER_BYTES - 1, CALLER_BYTES, CALLER_BYTES + 3])
def test_a_connection_that_ends_anywhere_in_a_message_changes_nothing(service: Service, size: int) -> None:
    host = recorded_use(service)
    with stranger(service) as cut:
        with contextlib.suppress(OSError):  # it has ended the connection already
            cut.sendall(host.from_caller[:size])
            cut.shutdown(socket.SHUT_WR)
        end(cut)
    service.use(service.port)
    assert service.count() == 8


@pytest.mark.parametrize("at", [0, 11, 12, HELLO_BYTES - 1, HELLO_BYTES, CALLER_BYTES - 1])
def test_a_changed_bit_of_the_callers_handshake_ends_it(service: Service, at: int) -> None:
    """In the protocol's name, the rank, the nonce and the proof."""
    service.seconds = SHORT_S
    refused = pytest.raises((StoreError, OSError))
    with between(service, to_listener=partial(FlipAt, at), changes_handshake=True) as host, refused:
        service.use(host.port)
    assert service.count() == 0


@pytest.mark.parametrize("at", [0, PROOF_BYTES - 1, PROOF_BYTES, ANSWER_BYTES - 1])
def test_a_changed_bit_of_the_listeners_handshake_ends_it(service: Service, at: int) -> None:
    """In the nonce and the proof."""
    refused = pytest.raises((StoreError, HandshakeError), match=r"another (key|secret)")
    with between(service, to_caller=partial(FlipAt, at), changes_handshake=True) as host, refused:
        service.use(host.port)
    assert service.count() == 0


def test_a_huge_message_harms_its_own_connection_only(service: Service) -> None:
    """All lengths are as large as they can be."""
    service.seconds = SHORT_S
    refused = pytest.raises((StoreError, OSError))
    with between(service, to_listener=lambda: lambda _: b"\xff" * (1 << 16)) as host, refused:
        service.use(host.port)
    service.seconds = LIMIT_S
    service.use(service.port)
    assert service.count() == 4


def test_a_caller_that_sends_a_byte_now_and_then_keeps_nobody_waiting(service: Service) -> None:
    hello = bytes(recorded_use(service).from_caller[:HELLO_BYTES])
    with stranger(service) as slow:
        for byte in hello[:5]:
            slow.sendall(bytes([byte]))
            service.use(service.port)
    assert service.count() == 24


@pytest.mark.parametrize("pause", [60.0, 0.05], ids=["silent", "slow"])
def test_a_store_gives_up_a_caller_that_does_not_complete_the_handshake(
    monkeypatch: pytest.MonkeyPatch, pause: float
) -> None:
    monkeypatch.setattr(stores, "_GRACE_SECONDS", SHORT_S)
    service = StoreService()
    hello = b"smdist-2" + bytes(HELLO_BYTES - 8)
    with stranger(service) as caller:
        drip(caller, hello, pause)
        assert end(caller) == b""
    service.close()


@pytest.mark.parametrize("pause", [60.0, 0.05], ids=["silent", "slow"])
def test_a_caller_gives_up_a_listener_that_does_not_complete_the_handshake(pause: float) -> None:
    near, far = socket.socketpair()
    with near, far:
        drip(far, bytes(ANSWER_BYTES), pause)
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            initiate_handshake(near, KEY, 0, 1, time.monotonic() + SHORT_S)
        assert time.monotonic() - began < LIMIT_S / 2


def test_a_listener_that_sends_back_what_it_gets_is_refused_and_gets_no_proof() -> None:
    near, far = socket.socketpair()

    def echo() -> None:
        hello = read(far, HELLO_BYTES)
        far.sendall((hello + hello)[:ANSWER_BYTES])

    with near, far:
        threading.Thread(target=echo, daemon=True).start()
        with pytest.raises(HandshakeError, match="another key"):
            initiate_handshake(near, KEY, 0, 1, time.monotonic() + LIMIT_S)
        near.close()
        assert far.recv(4096) == b""


def drip(sock: socket.socket, data: bytes, pause: float) -> None:
    """Sends one byte after each pause, on a thread, until the connection ends."""

    def send() -> None:
        with contextlib.suppress(OSError):
            for byte in data:
                time.sleep(pause)
                sock.sendall(bytes([byte]))

    threading.Thread(target=send, daemon=True).start()


# Between the hosts, after the handshake: each change is made to the second message


class Second:
    """Changes the second message that passes, which the sender does not send before the first is received."""

    def __init__(self, change: Callable[[bytes, bytes], bytes]) -> None:
        self._change, self._first = change, b""
        self._is_done = False

    def __call__(self, data: bytes) -> bytes:
        first, self._first = self._first, self._first or data
        if not first or self._is_done:
            return data
        self._is_done = True
        return self._change(first, data)


CHANGES: dict[str, Callable[[bytes, bytes], bytes]] = {
    "the first message in place of the second": lambda first, _: first,
    "the first message again": lambda first, data: first + data,
    "a shorter length": lambda _, data: data[:7] + bytes([data[7] - 1]) + data[8:],
    "another bit of the tag": flip(20),
    "another bit of the head": flip(-8),
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_message_that_is_changed_between_the_hosts_is_not_obeyed(service: Service, how: str) -> None:
    refused = pytest.raises((StoreError, OSError))
    with between(service, to_listener=partial(Second, CHANGES[how])) as host, refused:
        service.use(host.port)
    assert service.count() == 1


def test_a_message_of_another_connection_is_not_obeyed(service: Service) -> None:
    recorded = bytes(recorded_use(service).from_caller[CALLER_BYTES:])
    refused = pytest.raises((StoreError, OSError))
    with between(service, to_listener=lambda: lambda _: recorded) as host, refused:
        service.use(host.port)
    assert service.count() == 4


@pytest.mark.parametrize("service", [StoreService], indirect=True)
@pytest.mark.parametrize("how", CHANGES)
def test_an_answer_that_is_changed_between_the_hosts_is_not_believed(service: Service, how: str) -> None:
    refused = pytest.raises(StoreError, match="is not what rank 0 sent")
    with between(service, to_caller=partial(Second, CHANGES[how])) as host, refused:
        service.use(host.port)
    assert service.count() == 2


@pytest.mark.parametrize("service", [StoreService], indirect=True)
def test_a_request_that_is_sent_back_is_not_its_answer(service: Service) -> None:
    """It has the number of the answer, and a tag of the same connection."""
    refused = pytest.raises(StoreError, match="is not what rank 0 sent")
    with between(service, to_caller=lambda: lambda _: bytes(host.from_caller[CALLER_BYTES:])) as host, refused:
        service.use(host.port)
    assert service.count() == 1
