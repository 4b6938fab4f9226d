"""The handshake and the frames, over a socket of this machine."""

from __future__ import annotations

import contextlib
import gc
import select
import socket
import struct
import threading
import time
import weakref
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal_toolkit.hosts import agent, messages, resolve, wire
from shoal_toolkit.hosts.agent import Agent
from shoal_toolkit.hosts.connect import WorkerSearch
from shoal_toolkit.hosts.wire import Channel, look_up_host
from shoal_toolkit.system.loop import Loop

from ..launching import find_port

HOSTS = ["localhost", "127.0.0.1"]  # two names of this machine
HELLO, WELCOME, REFUSED, START = b"H", b"W", b"R", b"S"


def meet(loop: Loop, ours: str, theirs: str, agents_hosts: list[str] = HOSTS) -> list[str]:
    """Let an agent and a first host meet; returns what happened, the two channels closed."""
    happened: list[str] = []
    channels: list[Channel] = []
    port = find_port()

    def welcomed(channel: Channel) -> None:
        channels.append(channel)
        happened.append("agent")

    def found(host: str, channel: Channel) -> None:
        channels.append(channel)
        happened.append(f"found {host}")

    agent = Agent(loop, port, theirs, agents_hosts, HOSTS[1], welcomed)
    search = WorkerSearch(loop, HOSTS, port, ours, found, happened.append, seconds=20)

    def refusals() -> list[str]:
        return [attempt.refusal for attempt in search.missing.values() if attempt.refusal]

    loop.run_until(lambda: len(happened) == 2 or bool(refusals()))
    happened += refusals()
    search.close()
    agent.close()
    for channel in channels:
        channel.close()
    return happened


@pytest.mark.parametrize("secret", ["", "s3cret", "é\udcff"])
def test_hosts_with_the_same_secret_meet(loop: Loop, secret: str) -> None:
    assert set(meet(loop, secret, secret)) == {"agent", "found 127.0.0.1"}


@pytest.mark.parametrize(("ours", "theirs"), [("a", "b"), ("a", ""), ("", "b")])
def test_hosts_with_other_secrets_do_not(loop: Loop, ours: str, theirs: str) -> None:
    assert meet(loop, ours, theirs) == ["it refused this first host: its SHOAL_JOB_SECRET is not this host's"]


def test_hosts_of_another_job_do_not(loop: Loop) -> None:
    (happened,) = meet(loop, "", "", ["localhost", "127.0.0.1", "algo-3"])
    assert "lists other hosts" in happened


class Visitor:
    """Speaks to the agent of a worker; `forged` replaces fields of the handshake that its proof is about."""

    def __init__(self, loop: Loop, port: int, secret: str, source: str, role: str, forged: dict[str, str]) -> None:
        self.received: list[bytes] = []
        self.lost: list[str] = []
        self._secret, self._role, self._forged = secret, role, forged
        self._transcript: dict[str, str] = {}
        sock = socket.create_connection(("127.0.0.1", port), 5, (source, 0))
        self.channel = Channel(loop, sock, self._message, self.lost.append)

    def _message(self, message: Any) -> None:
        self.received.append(messages.encode_message(message)[0])
        if isinstance(message, messages.Welcome):
            self.channel.start(wire.make_seals(self._secret, "first", self._transcript))
            self.channel.send(messages.StartDaemon("orted"))
        if not isinstance(message, messages.Hello):
            return
        nonce, hosts = wire.make_nonce(), wire.hash_hosts(HOSTS)
        self._transcript = {
            "first": HOSTS[0],
            "worker": HOSTS[1],
            "hosts": hosts,
            "first_nonce": nonce,
            "worker_nonce": message.nonce,
            **self._forged,
        }
        self.channel.send(messages.Prove(nonce, hosts, wire.make_proof(self._secret, self._role, self._transcript)))


def visit(
    loop: Loop, secret: str = "s3cret", source: str = "127.0.0.1", role: str = "first", **forged: str
) -> tuple[list[bytes], list[bytes]]:
    """Visits an agent with the secret s3cret; returns its answers, and the frames that it passed on."""
    channels: list[Channel] = []
    passed_on: list[bytes] = []

    def welcomed(channel: Channel) -> None:
        channel.on_message = lambda message: passed_on.append(messages.encode_message(message)[0])
        channels.append(channel)

    port = find_port()
    agent = Agent(loop, port, "s3cret", HOSTS, HOSTS[1], welcomed)
    visitor = Visitor(loop, port, secret, source, role, forged)
    loop.run_until(lambda: bool(visitor.lost) or (WELCOME in visitor.received and bool(passed_on)))
    agent.close()
    for channel in (visitor.channel, *channels):
        channel.close()
    return visitor.received, passed_on


def test_who_proves_the_secret_from_the_first_hosts_address_is_served(loop: Loop) -> None:
    """Shows that the visits below are valid apart from the forged part."""
    assert visit(loop) == ([HELLO, WELCOME], [START])


def test_a_peer_without_the_secret_is_refused_and_not_served(loop: Loop) -> None:
    refused: tuple[list[bytes], list[bytes]] = ([HELLO, REFUSED], [])
    assert visit(loop, secret="other") == refused
    assert visit(loop, role="worker") == refused
    assert visit(loop, first_nonce=wire.make_nonce()) == refused
    assert visit(loop, worker_nonce=wire.make_nonce()) == refused
    assert visit(loop, worker="algo-3") == refused


def test_who_comes_from_another_address_is_not_even_greeted(loop: Loop) -> None:
    assert visit(loop, source="127.0.0.2") == ([], [])


def test_who_comes_again_from_another_address_is_refused_without_a_look_up(loop: Loop) -> None:
    port, channels = find_port(), list[Channel]()
    agent = Agent(loop, port, "s3cret", HOSTS, HOSTS[1], channels.append)
    visitors = []
    for _ in range(2):
        visitor = Visitor(loop, port, "s3cret", "127.0.0.2", "first", {})
        visitors.append(visitor)
        loop.run_until(lambda: bool(visitors[-1].lost or channels))
    agent.close()
    for channel in (*channels, *(visitor.channel for visitor in visitors)):
        channel.close()
    assert ([visitor.received for visitor in visitors], channels) == ([[], []], [])


def test_a_proof_holds_for_one_role_and_one_handshake_only() -> None:
    transcript = {"first_nonce": "1", "worker_nonce": "2"}
    proof = wire.make_proof("s", "first", transcript)
    assert wire.equal_proofs(proof, wire.make_proof("s", "first", dict(reversed(transcript.items()))))
    assert not wire.equal_proofs(proof, wire.make_proof("s", "worker", transcript))
    assert not wire.equal_proofs(proof, wire.make_proof("s", "first", {**transcript, "worker_nonce": "3"}))
    assert not wire.equal_proofs(proof, None)


class Pair:
    """A channel, and the raw other end of it."""

    def __init__(self, loop: Loop) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.raw = socket.create_connection(listener.getsockname())
        sock, _ = listener.accept()
        listener.close()
        self.received: list[Any] = []
        self.lost: list[str] = []
        self.channel = Channel(loop, sock, self.received.append, self.lost.append)

    def close(self) -> None:
        self.channel.close()
        self.raw.close()


def framed(kind: bytes, payload: bytes) -> bytes:
    return (len(payload) + 1).to_bytes(4, "big") + kind + payload


TRANSCRIPT = {"first_nonce": "1", "worker_nonce": "2"}


def seals(role: str) -> tuple[wire.Seal, wire.Seal]:
    return wire.make_seals("s3cret", role, TRANSCRIPT)


def sealed(*sent: Any, role: str = "first") -> list[bytes]:
    """The frames of these messages, with tags."""
    seal = seals(role)[0]
    encoded = map(messages.encode_message, sent)
    return [framed(kind, payload + seal.make_tag(kind, payload)) for kind, payload in encoded]


@given(
    st.lists(st.tuples(st.integers(1, 2), st.integers(0, 99), st.binary(max_size=300)), min_size=1), st.integers(1, 99)
)
@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_messages_arrive_as_they_were_sent_in_pieces_of_any_size(
    loop: Loop, sent: list[tuple[int, int, bytes]], size: int
) -> None:
    pair = Pair(loop)
    pair.channel.start(seals("worker"))
    outputs = [messages.RankOutput(*each) for each in sent]
    stream = b"".join(sealed(*outputs))
    for start in range(0, len(stream), size):
        pair.raw.sendall(stream[start : start + size])
    loop.run_until(lambda: len(pair.received) == len(sent))
    assert pair.received == outputs
    pair.close()


@pytest.mark.parametrize("garbage", [b"\xff" * 9, b"\0\0\0\0H", b"GET / HTTP/1.1\r\n", framed(b".", b"")])
def test_garbage_ends_the_connection(loop: Loop, garbage: bytes) -> None:
    pair = Pair(loop)
    pair.raw.sendall(garbage)
    loop.run_until(lambda: bool(pair.lost))
    assert "it sent a wrong frame" in pair.lost[0]
    assert not pair.channel.open
    pair.close()


GO, STOP = messages.GO, messages.PassSignal(15)
CHANGES: dict[str, list[bytes]] = {
    "added": [framed(b"G", b"")],
    "with another tag": [framed(b"G", bytes(16))],
    "changed": [sealed(STOP)[0].replace(b"15", b"02")],
    "of another kind": [sealed(GO)[0].replace(b"G", b"r")],
    "repeated": sealed(GO) * 2,
    "left out": sealed(GO, STOP)[1:],
    "moved": sealed(GO, STOP)[::-1],
    "sent back": sealed(GO, role="worker"),
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_message_that_was_changed_between_the_hosts_is_refused(loop: Loop, how: str) -> None:
    """Such as a host that answers for both addresses, and passes on the frames."""
    pair = Pair(loop)
    pair.channel.start(seals("worker"))
    pair.raw.sendall(b"".join(CHANGES[how]))
    loop.run_until(lambda: bool(pair.lost))
    assert "was changed, or is out of order" in pair.lost[0]
    assert pair.received == ([GO] if how == "repeated" else [])
    pair.close()


def test_a_closed_connection_is_lost_before_the_limit_of_silence(loop: Loop) -> None:
    pair = Pair(loop)
    pair.channel.start(seals("worker"))
    began = time.monotonic()
    pair.raw.shutdown(socket.SHUT_WR)
    loop.run_until(lambda: bool(pair.lost))
    assert pair.lost == ["it closed the connection"]
    assert time.monotonic() - began < wire.LOST_SECONDS / 2
    pair.close()


def test_a_peer_that_falls_silent_is_noticed(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HEARTBEAT_SECONDS", 0.01)
    monkeypatch.setattr(wire, "LOST_SECONDS", 0.05)
    pair = Pair(loop)
    pair.channel.start(seals("worker"))
    loop.run_until(lambda: bool(pair.lost))
    assert "it was silent" in pair.lost[0]
    pair.close()


# Connections that take places


class Meeting:
    """A worker and its first host, which connects on request."""

    def __init__(self, loop: Loop, secret: str = "s3cret", port: int = 0) -> None:
        self.port = port or find_port()
        self.met: list[str] = []
        self._loop = loop
        self._opened: list[Any] = []
        self.agent = Agent(loop, self.port, secret, HOSTS, HOSTS[1], self._came)

    def _came(self, channel: Channel) -> None:
        self._opened.append(channel)
        self.met.append("agent")

    def _found(self, host: str, channel: Channel) -> None:
        self._opened.append(channel)
        self.met.append(host)

    def first_host(self, seconds: float = 5) -> WorkerSearch:
        search = WorkerSearch(self._loop, HOSTS, self.port, "s3cret", self._found, self.met.append, seconds)
        self._opened.append(search)
        return search

    def crowd(self, source: str) -> None:
        """Take 40 connections from an address, which say nothing, and let the agent accept them."""
        self._opened += [socket.create_connection(("127.0.0.1", self.port), 5, (source, 0)) for _ in range(40)]
        while select.select([self.agent._listener], [], [], 0)[0]:
            self._loop.step()

    def ended(self) -> list[str]:
        """Wait until the hosts have met, or the first host has given up."""
        self._loop.run_until(lambda: len(self.met) == 2 or any("missing" in event for event in self.met))
        self.close()
        return sorted(self.met)

    def close(self) -> None:
        for each in (self.agent, *self._opened):
            each.close()


def test_a_silent_peer_takes_no_place_of_the_first_host(loop: Loop) -> None:
    """From the first host's own address too: another user of that machine cannot keep it out."""
    meeting = Meeting(loop)
    meeting.crowd("127.0.0.1")
    meeting.first_host()
    assert meeting.ended() == ["127.0.0.1", "agent"]


def test_strangers_take_no_place_while_the_name_is_looked_up(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come again and again, and each time the look-up takes longer than the first host waits."""
    monkeypatch.setattr(agent, "_RESOLVE_AGAIN_SECONDS", 0.0)
    meeting, never = Meeting(loop), threading.Event()
    meeting.crowd("127.0.0.2")
    loop.run_until(lambda: bool(meeting.agent._allowed))
    monkeypatch.setattr(
        resolve, "look_up_host", lambda host, port: never.wait(20) if port == 0 else look_up_host(host, port)
    )
    meeting.crowd("127.0.0.2")
    meeting.first_host()
    assert meeting.ended() == ["127.0.0.1", "agent"]
    never.set()


def test_a_stale_worker_ends_no_new_job(loop: Loop, capfd: pytest.CaptureFixture[str]) -> None:
    """It refuses the first host, without having proved anything; then the right worker comes at its address."""
    stale = Meeting(loop, secret="of yesterday")
    search = stale.first_host(seconds=20)
    loop.run_until(lambda: bool(search.missing[HOSTS[1]].refusal))
    stale.agent.close()
    right = Meeting(loop, port=stale.port)
    loop.run_until(lambda: bool(stale.met and right.met))
    stale.close()
    right.close()
    assert stale.met + right.met == ["127.0.0.1", "agent"]
    assert "127.0.0.1: it refused this first host: its SHOAL_JOB_SECRET is not this host's" in capfd.readouterr().err


def connect() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        far = socket.create_connection(listener.getsockname())
        return listener.accept()[0], far


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of channels, which have a heartbeat in nearly each step of the loop."""
    now = [0.0]
    monkeypatch.setattr(wire, "monotonic", lambda: now[0])
    monkeypatch.setattr(wire, "HEARTBEAT_SECONDS", 0.0001)
    return now


def test_a_silent_connection_is_lost_unless_it_is_paused(loop: Loop, clock: list[float]) -> None:
    def beat() -> None:
        for _ in range(5):
            if channel.open:  # it has a heartbeat
                loop.step()

    near, far = connect()
    received: list[Any] = []
    lost: list[str] = []
    channel = Channel(loop, near, received.append, lost.append)
    channel.start((wire.Seal(b"near"), wire.Seal(b"far")))
    channel.pause()
    kind, payload = messages.encode_message(messages.StartDaemon("orted"))
    payload += wire.Seal(b"far").make_tag(kind, payload)
    far.sendall(struct.pack("!Ic", len(payload) + 1, kind) + payload)
    clock[0] = 100
    beat()
    assert (received, lost) == ([], []), "nothing is read, and the silence does not count"
    channel.resume()
    beat()
    assert received == [messages.StartDaemon("orted")]
    channel.pause()
    clock[0] = 200
    channel.resume()
    beat()
    clock[0] = 210
    beat()
    assert lost == [], "10 s from when it could read again"
    clock[0] = 211
    beat()
    assert lost == ["it was silent for 11 s"] and not channel.open
    far.close()


def test_a_closed_channel_is_forgotten_by_the_loop(loop: Loop, clock: list[float]) -> None:
    near, far = connect()
    channel = Channel(loop, near, print, print)
    channel.start((wire.Seal(b"near"), wire.Seal(b"far")))
    channel.close()
    left = weakref.ref(channel)
    del channel
    gc.collect()
    assert left() is None
    far.close()


def test_a_channel_that_has_sent_all_waits_for_nothing(loop: Loop) -> None:
    """Otherwise the loop would run for as long as the socket takes more, which is always."""
    near, far = connect()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    held: list[int] = []
    channel = Channel(loop, near, print, print)
    channel.on_held = held.append
    while not held or not held[-1]:
        channel.send(messages.StartDaemon("x" * 100_000))
    far.settimeout(0)
    while held[-1]:
        with contextlib.suppress(BlockingIOError):
            far.recv(1 << 20)
        loop.call_later(0.001, lambda: None)
        loop.step()
    calls = len(held)
    for _ in range(5):
        loop.call_later(0, lambda: None)
        loop.step()
    assert len(held) == calls
    channel.close()
    far.close()


@pytest.mark.parametrize(("size", "problem"), [(4096, []), (4097, ["it sent a wrong frame (a frame of 4097 bytes)"])])
def test_who_has_not_proved_the_secret_sends_small_frames_only(loop: Loop, size: int, problem: list[str]) -> None:
    near, far = connect()
    lost: list[str] = []
    channel = Channel(loop, near, print, lost.append)
    far.sendall(struct.pack("!Ic", size, b"H"))
    loop.step()
    assert lost == problem
    channel.close()
    far.close()
