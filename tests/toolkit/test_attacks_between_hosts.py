"""Attacks on the connection between two hosts, over sockets: proofs and frames that are recorded, changed or late."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from shoal_toolkit.hosts import messages, wire
from shoal_toolkit.hosts.agent import Agent
from shoal_toolkit.hosts.connect import WorkerSearch
from shoal_toolkit.hosts.messages import Hello, Prove, StartDaemon, Welcome
from shoal_toolkit.hosts.wire import Channel
from shoal_toolkit.system.loop import Loop

HOSTS = ["localhost", "127.0.0.1"]  # two names of this machine
SECRET = "0123456789abcdef"
LIMIT_S = 30.0
NONCE = "0" * 32


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


def framed(message: Any) -> bytes:
    kind, payload = messages.encode_message(message)
    return (len(payload) + 1).to_bytes(4, "big") + kind + payload


class Stranger:
    """One end of a connection, which an attacker reads and writes while the loop runs."""

    def __init__(self, loop: Loop, sock: socket.socket) -> None:
        self._loop, self._sock = loop, sock
        self._stream = b""
        self.has_ended = False
        sock.setblocking(False)

    def send(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # the host has ended the connection
            self._sock.sendall(data)

    def next_message(self) -> Any:
        """The next message of the handshake; None if the connection ends."""
        self._loop.run_until(lambda: self._has_message() or self.has_ended)
        if not self._has_message():
            return None
        end = 4 + int.from_bytes(self._stream[:4], "big")
        kind, payload, self._stream = self._stream[4:5], self._stream[5:end], self._stream[end:]
        return messages.parse_message(kind, payload, False)

    def wait_for_end(self) -> bytes:
        """The bytes that come before the connection ends."""
        self._loop.run_until(lambda: self._receive() or self.has_ended)
        return self._stream

    def close(self) -> None:
        self._sock.close()

    def _has_message(self) -> bool:
        self._receive()
        return len(self._stream) >= 4 and len(self._stream) >= 4 + int.from_bytes(self._stream[:4], "big")

    def _receive(self) -> bool:
        """Receives what has arrived; false. Sets a timer, so that the loop asks again."""
        with contextlib.suppress(BlockingIOError):
            try:
                data = self._sock.recv(65536)
            except ConnectionError:
                data = b""
            self._stream += data
            self.has_ended = not data
        self._loop.call_later(0.005, lambda: None)
        return False


class Worker:
    """A worker that listens, and the first hosts that it has accepted."""

    def __init__(self, loop: Loop, secret: str = SECRET) -> None:
        self._loop = loop
        self.accepted: list[Channel] = []
        self._strangers: list[Stranger] = []
        self.agent = Agent(loop, 0, secret, HOSTS, HOSTS[1], self.accepted.append)
        self.port: int = self.agent._listener.getsockname()[1]

    def connect(self) -> Stranger:
        sock = socket.create_connection(("127.0.0.1", self.port), LIMIT_S)
        self._strangers.append(Stranger(self._loop, sock))
        return self._strangers[-1]

    def close(self) -> None:
        self.agent.close()
        for channel in self.accepted:
            channel.close()
        for stranger in self._strangers:
            stranger.close()


@pytest.fixture
def worker(loop: Loop) -> Iterator[Worker]:
    made = Worker(loop)
    yield made
    made.close()


def make_proof(hello: Hello, role: str = "first", secret: str = SECRET) -> Prove:
    """The first host's answer to a worker's hello."""
    transcript = wire.make_transcript(HOSTS, HOSTS[1], NONCE, hello.nonce)
    return Prove(NONCE, wire.hash_hosts(HOSTS), wire.make_proof(secret, role, transcript))


def test_a_right_proof_is_accepted_once(worker: Worker) -> None:
    """Shows that the attacks below fail for what they change."""
    first = worker.connect()
    first.send(framed(make_proof(first.next_message())))
    assert isinstance(first.next_message(), Welcome)
    assert len(worker.accepted) == 1


def test_a_recorded_proof_is_refused_by_the_next_handshake(loop: Loop) -> None:
    recorded = b""
    answers = []
    for _ in range(2):  # a restarted worker has the same name, hosts and secret
        worker = Worker(loop)
        first = worker.connect()
        hello = first.next_message()
        recorded = recorded or framed(make_proof(hello))
        first.send(recorded)
        answers.append((type(first.next_message()).__name__, len(worker.accepted)))
        worker.close()
    assert answers == [("Welcome", 1), ("Refused", 0)]


@pytest.mark.parametrize("secret", ["", "0123456789abcdeF", SECRET + "0"])
def test_a_proof_with_another_secret_is_refused(worker: Worker, secret: str) -> None:
    first = worker.connect()
    first.send(framed(make_proof(first.next_message(), secret=secret)))
    assert isinstance(first.next_message(), messages.Refused)
    assert (first.wait_for_end(), worker.accepted) == (b"", [])


def test_a_workers_own_words_are_no_proof(worker: Worker) -> None:
    first = worker.connect()
    first.send(framed(first.next_message()))
    assert (first.wait_for_end(), worker.accepted) == (b"", [])
    second = worker.connect()
    second.send(framed(make_proof(second.next_message(), role="worker")))
    assert isinstance(second.next_message(), messages.Refused)


def test_a_worker_that_proves_nothing_gets_no_answer_before_the_first_host(worker: Worker) -> None:
    """A stranger who connects gets a name and a nonce, and nothing that depends on the secret."""
    with_secret, other = worker.connect(), Worker(worker._loop, "another secret, as long")
    without = other.connect()
    hellos = with_secret.next_message(), without.next_message()
    assert [hello._replace(nonce="") for hello in hellos] == [Hello(messages.VERSION, HOSTS[1], "")] * 2
    other.close()


@pytest.mark.parametrize("answer", ["reflected", "guessed", "hello", "nothing", "cut"])
def test_a_first_host_takes_no_worker_without_its_own_proof(
    loop: Loop, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "HANDSHAKE_SECONDS", 0.2)
    found: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(True)
        port = listener.getsockname()[1]
        search = WorkerSearch(loop, HOSTS, port, SECRET, lambda host, _: found.append(host), found.append, 20)
        attempt = search.missing[HOSTS[1]]
        loop.run_until(lambda: attempt._channel is not None)
        fake = Stranger(loop, listener.accept()[0])
        if answer != "nothing":
            fake.send(framed(Hello(messages.VERSION, HOSTS[1], NONCE)))
            proof = fake.next_message()
            answers: dict[str, bytes] = {
                "reflected": framed(Welcome(proof.proof)),
                "guessed": framed(Welcome("0" * 64)),
                "hello": framed(Hello(messages.VERSION, HOSTS[1], NONCE)),
                "cut": framed(Welcome("0" * 64))[:-1],
            }
            fake.send(answers[answer])
        fake.wait_for_end()
        loop.run_until(lambda: attempt._channel is None)
        search.close()
        fake.close()
    assert found == []


@pytest.mark.parametrize("pause", [60.0, 0.02], ids=["silent", "slow"])
def test_a_worker_ends_a_connection_that_does_not_complete_the_handshake(
    loop: Loop, worker: Worker, pause: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "HANDSHAKE_SECONDS", 0.3)
    slow = worker.connect()
    proof = framed(make_proof(slow.next_message()))

    def drip(rest: bytes) -> None:
        slow.send(rest[:1])
        if rest:
            timers.append(loop.call_later(pause, lambda: drip(rest[1:])))

    timers: list[Any] = []
    drip(proof)
    assert (slow.wait_for_end(), worker.accepted) == (b"", [])
    for timer in timers:
        timer.cancel()


# Frames after the handshake


class Sealed:
    """A channel after the handshake, and the raw other end of it."""

    def __init__(self, loop: Loop) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.raw = socket.create_connection(listener.getsockname())
            sock, _ = listener.accept()
        self.heard: list[Any] = []
        self.lost: list[str] = []
        self._loop = loop
        self.channel = Channel(loop, sock, self.heard.append, self.lost.append)
        self.channel.start((wire.Seal(b"worker"), wire.Seal(b"first")))

    def receive(self, stream: bytes) -> list[Any]:
        """The messages that are delivered of a stream, after which the other side ends."""
        self.raw.sendall(stream)
        self.raw.shutdown(socket.SHUT_WR)
        self._loop.run_until(lambda: bool(self.lost))
        self.channel.close()
        self.raw.close()
        return self.heard


def sealed(*sent: Any) -> list[bytes]:
    """The frames of the first host."""
    seal = wire.Seal(b"first")
    frames = []
    for kind, payload in map(messages.encode_message, sent):
        payload += seal.make_tag(kind, payload)
        frames.append((len(payload) + 1).to_bytes(4, "big") + kind + payload)
    return frames


START, GO = StartDaemon("orted"), messages.GO


def test_of_a_frame_with_any_changed_bit_nothing_is_delivered(loop: Loop) -> None:
    (frame,) = sealed(START)
    for bit in range(8 * len(frame)):
        changed = bytearray(frame)
        changed[bit // 8] ^= 1 << bit % 8
        assert Sealed(loop).receive(bytes(changed)) == [], f"bit {bit}"


def test_of_a_frame_that_is_cut_anywhere_nothing_is_delivered(loop: Loop) -> None:
    first, second = sealed(GO, START)
    for size in range(len(second)):
        assert Sealed(loop).receive(first + second[:size]) == [GO], f"{size} bytes"


def test_frames_are_delivered_once_and_in_order_only(loop: Loop) -> None:
    one, two, three = sealed(GO, START, GO)
    assert Sealed(loop).receive(one + two + three) == [GO, START, GO]
    for stream, delivered in {
        one + one: [GO],
        one + three: [GO],
        two + one: [],
        one + two + one: [GO, START],
        three: [],
    }.items():
        assert Sealed(loop).receive(stream) == delivered


def test_a_sealed_frame_that_is_too_long_ends_the_connection_before_it_arrives(loop: Loop) -> None:
    for size in (wire.MAX_FRAME + 17, 0xFFFFFFFF, 0):
        pair = Sealed(loop)
        pair.raw.sendall(size.to_bytes(4, "big") + b"o")
        loop.run_until(lambda pair=pair: bool(pair.lost))  # type: ignore[misc]
        assert pair.lost == [f"it sent a wrong frame (a frame of {size} bytes)"]
        pair.raw.close()


def test_a_message_of_the_handshake_is_not_obeyed_after_it_without_a_tag(loop: Loop) -> None:
    assert Sealed(loop).receive(framed(Hello(messages.VERSION, HOSTS[1], NONCE))) == []
