"""Frames from anybody: they are parsed, or refused as no frame of the protocol, and nothing else happens."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, seed, settings
from hypothesis import strategies as st

from shoal_toolkit.hosts import connect, messages
from shoal_toolkit.hosts.agent import Agent
from shoal_toolkit.hosts.connect import WorkerSearch
from shoal_toolkit.hosts.messages import ProtocolError
from shoal_toolkit.hosts.wire import Channel
from shoal_toolkit.system.loop import Loop

from ..launching import find_port
from ..repeats import SEED, times
from .test_wire import HOSTS

DEEP = b"[" * 2000
NONCE, PROOF = "0" * 32, "0" * 64
VALID: list[Any] = [
    messages.Hello(messages.VERSION, "algo-2", NONCE),
    messages.Prove(NONCE, PROOF, PROOF),
    messages.Welcome(PROOF),
    messages.Refused("because"),
    messages.StartDaemon('orted -mca ess "env"'),
    messages.PassSignal(15),
    messages.JobEnded(1, "it failed", {"hosts": ["a", "b"], "ranks": 2, "launch_seconds": 0.5, "launcher": None}),
    messages.JobEnded(0, "", {"hosts": ["a", "b"], "restarts": [{"number": 1, "rank": 0, "seconds": None}]}),
    messages.RankStarted(3),
    messages.RankOutput(1, 3, b"\0words\xff"),
    messages.RankEnded(3, 137, {"oom_kills": -1, "shm": (1 << 64) - 1}),
    messages.CommandEnded(1, "words", None, {}, ""),
    messages.CommandEnded(1, "words", 3, {}, "it cannot be recorded"),
    messages.HostFailed(0, 2, "no script", False),
    messages.PrepareRestart(3, "rank 1: it was killed"),
    messages.StopReceived(2),
    messages.Register(2),
    messages.Addresses(["10.0.0.1", "10.0.0.2"]),
    messages.Measure("algo-2", 7411),
    messages.Measured("algo-2", 90, 10**9, -3, ""),
    messages.Facts({"gpus": 8, "driver": "550.1", "time": 1.5}),
    messages.Ready(0),
    messages.NextHosts(["algo-1", "algo-3"]),
    messages.GO,
    messages.PING,
    messages.PAUSE,
]
HANDSHAKE = VALID[:4]


@pytest.mark.parametrize("message", VALID)
def test_every_message_arrives_as_it_was_sent(message: Any) -> None:
    assert messages.parse_message(*messages.encode_message(message), proved=True) == message


@pytest.mark.parametrize("message", VALID)
def test_before_the_proof_only_the_handshake_is_understood(message: Any) -> None:
    if message in HANDSHAKE:
        assert messages.parse_message(*messages.encode_message(message), proved=False) == message
    else:
        with pytest.raises(ProtocolError, match="before the end of the handshake"):
            messages.parse_message(*messages.encode_message(message), proved=False)


HOSTILE = {
    "deep": b'{"nonce": ' + DEEP,
    "deep objects": b'{"a":' * 600,
    "infinite": b'{"version": Infinity, "host": "algo-2", "nonce": "0"}',
    "too large": b'{"version": 1e999, "host": "algo-2", "nonce": "0"}',
    "not a number": b'{"version": NaN, "host": "algo-2", "nonce": "0"}',
    "digits": b'{"version": ' + b"9" * 3900 + b', "host": "algo-2", "nonce": "0"}',
    "a list": b"[]",
    "a number": b"1",
    "nothing": b"",
    "half": b'{"nonce"',
    "half a surrogate": b'{"nonce": "\\ud800", "hosts": "\\ud800", "proof": "\\ud800"}',
    "no text": b'{"nonce": 1, "hosts": 2, "proof": 3}',
    "nested": b'{"nonce": {"a": 1}, "hosts": [], "proof": null}',
    "another field": json.dumps({"nonce": NONCE, "hosts": PROOF, "proof": PROOF, "more": 1}).encode(),
    "a field too few": json.dumps({"nonce": NONCE, "hosts": PROOF}).encode(),
    "no UTF-8": b'{"nonce": "\xff"}',
    "UTF-16": '{"nonce": "0"}'.encode("utf-16"),
}


@pytest.mark.parametrize("payload", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize(
    "kind", [messages.encode_message(message)[0] for message in VALID if message not in VALID[-3:]]
)
def test_hostile_payloads_are_refused(kind: bytes, payload: bytes) -> None:
    if kind == messages.OUTPUT and len(payload) >= 5:  # bytes of any kind, after a stream and a rank
        payload = b"\0" + payload
    with pytest.raises(ProtocolError):
        messages.parse_message(kind, payload, proved=True)


@pytest.mark.parametrize(
    "message",
    [
        messages.PassSignal(9),
        messages.PassSignal(True),
        messages.StopReceived(10**6),
        messages.RankStarted(-1),
        messages.RankStarted(1 << 40),
        messages.RankEnded(1, 1, {"facts": {"deep": 1}}),  # type: ignore[dict-item]
        messages.RankEnded(1, 1, {str(number): number for number in range(9999)}),
        messages.JobEnded(1, "", {"deep": {"er": 1}}),
        messages.JobEnded(1, "", {"restarts": [{"deep": {"er": 1}}]}),
        messages.JobEnded(1, "", {"restarts": [[1]]}),
        messages.HostFailed(0, 1, "", 1),  # type: ignore[arg-type]
        messages.PrepareRestart(1, "two\nlines"),
        messages.RankOutput(3, 1, b""),
        messages.RankOutput(0, 1, b""),
    ],
)
def test_values_that_no_peer_sends_are_refused(message: Any) -> None:
    with pytest.raises(ProtocolError):
        messages.parse_message(*messages.encode_message(message), proved=True)


@pytest.mark.parametrize("word", ["\x1b]0;title\x07", "\ntrain: a line of its own", "\r", "\u2028", "\u202e", "\ud800"])
def test_a_peer_without_a_proof_writes_only_plain_text_into_a_log(word: str) -> None:
    with pytest.raises(ProtocolError, match="printable"):
        messages.parse_message(*messages.encode_message(messages.Refused(f"because {word}")), proved=False)


# Drawn at random

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
KINDS = st.sampled_from([messages.encode_message(message)[0] for message in VALID]) | st.binary(min_size=1, max_size=1)


@st.composite
def payloads(draw: st.DrawFn) -> bytes:
    """Bytes, JSON, or a valid message with changed fields or bytes."""
    how = draw(st.sampled_from(["bytes", "json", "fields", "damaged"]))
    if how == "bytes":
        return draw(st.binary(max_size=200))
    if how == "json":
        return json.dumps(draw(VALUES)).encode()
    message = draw(st.sampled_from([each for each in VALID if not isinstance(each, messages.Bare)]))
    if how == "fields" and not isinstance(message, messages.RankOutput):
        fields = dict(zip(message._fields, message))
        name = draw(st.sampled_from(sorted(fields)))
        return json.dumps({**fields, name: draw(VALUES)}).encode()
    payload = bytearray(messages.encode_message(message)[1])
    payload[draw(st.integers(0, len(payload) - 1))] = draw(st.integers(0, 255))
    return bytes(payload)


def fuzzed(test: Callable[..., None]) -> Callable[..., None]:
    """Draws a few inputs in the suite, and 20,000 in `make soak`."""
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    drawn = settings(deadline=None, max_examples=times(100, 20_000), database=None, suppress_health_check=checks)
    marked: Callable[..., None] = pytest.mark.soak(seed(SEED)(drawn(test)))
    return marked


@fuzzed
@given(KINDS, payloads(), st.booleans())
@example(b"P", HOSTILE["deep"], False)
def test_parsing_raises_protocol_error_or_returns_the_sent_message(kind: bytes, payload: bytes, proved: bool) -> None:
    try:
        message = messages.parse_message(kind, payload, proved)
    except ProtocolError:
        return
    assert messages.parse_message(*messages.encode_message(message), proved) == message


class Doors:
    """An agent and a first host that wait for each other, and an outsider that sends to both."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.met: list[str] = []
        self.channels: list[Channel] = []
        self.agents_port, self.worker = find_port(), socket.create_server(("127.0.0.1", 0))
        self.worker.setblocking(False)
        self.agent = Agent(loop, self.agents_port, "s3cret", HOSTS, HOSTS[1], self._came)
        self.search = self._search(self.worker.getsockname()[1])

    def _search(self, port: int) -> WorkerSearch:
        return WorkerSearch(self.loop, HOSTS, port, "s3cret", self._found, self.met.append, seconds=600)

    def _came(self, channel: Channel) -> None:
        self.channels.append(channel)
        self.met.append("agent")

    def _found(self, host: str, channel: Channel) -> None:
        self.channels.append(channel)
        self.met.append(host)

    def say_to_agent(self, stream: bytes) -> None:
        """Send bytes to the agent, and wait until it hangs up. Nobody's mistake leaves the loop."""
        with socket.create_connection(("127.0.0.1", self.agents_port)) as outsider:
            self._say(outsider, stream)

    def say_to_first_host(self, stream: bytes) -> None:
        """Send bytes to the first host, which takes the outsider for its worker."""
        outsider = None
        while outsider is None:
            try:
                outsider, _ = self.worker.accept()
            except BlockingIOError:
                self.loop.step()
        with outsider:
            self._say(outsider, stream)

    def _say(self, outsider: socket.socket, stream: bytes) -> None:
        outsider.settimeout(10)
        outsider.sendall(stream)
        outsider.shutdown(socket.SHUT_WR)
        outsider.setblocking(False)
        while True:
            try:
                if not outsider.recv(4096):
                    return
            except BlockingIOError:
                self.loop.step()
            except ConnectionResetError:
                return

    def close(self) -> None:
        self.search.close()
        self.agent.close()
        self.worker.close()
        for channel in self.channels:
            channel.close()

    def let_the_right_ones_meet(self) -> list[str]:
        self.search.close()
        self.search = self._search(self.agents_port)
        self.loop.run_until(lambda: len(self.met) == 2)
        return sorted(self.met)


@pytest.fixture
def doors(monkeypatch: pytest.MonkeyPatch) -> Iterator[Doors]:
    monkeypatch.setattr(connect, "_RETRY_SECONDS", 0.0)  # of which the slowest is a multiple
    loop = Loop()
    made = Doors(loop)
    yield made
    made.close()
    loop.close()


def frame(kind: bytes, payload: bytes) -> bytes:
    return (len(payload) + 1).to_bytes(4, "big") + kind + payload


FRAMES = st.lists(st.builds(frame, KINDS, payloads()) | st.binary(max_size=40), min_size=1, max_size=3).map(b"".join)


@fuzzed
@given(FRAMES)
@example(frame(b"P", HOSTILE["deep"]))
@example(frame(b"P", HOSTILE["infinite"]))
def test_whatever_an_outsider_sends_to_a_worker_it_goes_on(doors: Doors, stream: bytes) -> None:
    doors.say_to_agent(stream)
    assert doors.met == []


@fuzzed
@given(FRAMES)
@example(frame(b"H", HOSTILE["deep"]))
@example(frame(b"R", b'{"reason": "go away"}'))
@example(
    frame(*messages.encode_message(messages.Hello(messages.VERSION, HOSTS[1], NONCE))) + frame(b"R", b'{"reason": "!"}')
)
def test_whatever_an_outsider_sends_to_the_first_host_it_goes_on(doors: Doors, stream: bytes) -> None:
    doors.say_to_first_host(stream)
    assert doors.met == []


def test_the_right_hosts_meet_after_hostile_messages(doors: Doors) -> None:
    for kind in (b"H", b"P", b"W", b"R", b"S", b"V"):
        for payload in HOSTILE.values():
            doors.say_to_agent(frame(kind, payload))
    doors.say_to_first_host(frame(b"H", HOSTILE["deep"]))
    assert doors.let_the_right_ones_meet() == ["127.0.0.1", "agent"]


def test_a_mistake_of_ours_is_not_blamed_on_the_peer(doors: Doors) -> None:
    """It leaves the loop, and ends the job as a fault of this toolkit."""

    def mistake(_: Any) -> None:
        raise ValueError("ours")

    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as peer:
        channel = Channel(doors.loop, server.accept()[0], mistake, doors.met.append)
        peer.sendall(frame(*messages.encode_message(HANDSHAKE[0])))
        with pytest.raises(ValueError, match="ours"):
            doors.loop.run_until(lambda: bool(doors.met))
        channel.close()
    assert doors.met == []
