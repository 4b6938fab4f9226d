"""The transport of model parallelism: authentication, peers that stall, and how a lost rank or host is noticed."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.launching import clean_environment
from tests.toolkit.netns import UNAVAILABLE, Host, cut, running, two_hosts

from smdistributed.core.frames import FrameWriter
from smdistributed.core.handshake import HandshakeError, Initiator, answer_handshake, initiate_handshake
from smdistributed.core.sockets import LOSS_SECONDS, own_address
from smdistributed.modelparallel.backend import transport
from smdistributed.modelparallel.backend.transport import Access, Transport

KEY = b"k" * 32
LOOPBACK = "127.0.0.1"
LIMIT_S = 60  # usually moments; longer on a busy machine
ACROSS_HOSTS = Path(__file__).parent / "ranks/transport_across_hosts.py"


class Rank:
    """A rank that keeps the messages that arrive."""

    def __init__(self, number: int, key: bytes = KEY, seconds: float = 1800) -> None:
        self.number, self.changed = number, threading.Condition()
        self.heads: list[tuple[int, bytes]] = []
        self.bodies: list[bytearray] = []
        self.lost: list[int] = []
        self.transport = Transport(number, Access(key, LOOPBACK), self._deliver, self._lose, seconds)

    def meet(self, *others: Rank) -> None:
        self.transport.set_peers({other.number: (LOOPBACK, other.transport.port) for other in others})

    def connect(self) -> socket.socket:
        """A stranger's connection to this rank."""
        return socket.create_connection((LOOPBACK, self.transport.port), LIMIT_S)

    def call(self, number: int) -> tuple[socket.socket, FrameWriter]:
        """A connection to this rank by another one, which the test plays."""
        sock = self.connect()
        session = initiate_handshake(sock, KEY, number, self.number, time.monotonic() + LIMIT_S)
        return sock, FrameWriter(self.transport._tag_key(session))

    def until(self, holds: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(holds, LIMIT_S), (self.heads, self.lost)

    def gets(self, head: bytes, source: int = 0) -> None:
        self.until(lambda: (source, head) in self.heads)

    def _deliver(self, source: int, head: bytes, bodies: list[bytearray]) -> None:
        with self.changed:
            self.heads.append((source, head))
            self.bodies += bodies
            self.changed.notify_all()

    def _lose(self, source: int) -> None:
        with self.changed:
            self.lost.append(source)
            self.changed.notify_all()


@pytest.fixture
def ranks() -> Iterator[tuple[Rank, Rank]]:
    """Two that have met."""
    both = Rank(0), Rank(1)
    both[0].meet(both[1])
    both[1].meet(both[0])
    yield both
    for each in both:
        each.transport.close()


def test_messages_of_any_size_arrive_as_they_were_sent(ranks: tuple[Rank, Rank]) -> None:
    sizes = [0, 1, 8191, 8192, 100_000, 0, 20 << 20]
    bodies = [
        bytearray(number % 251 for number in range(size % 1000)) * (size // max(1, size % 1000)) for size in sizes
    ]
    ranks[0].transport.send(1, b"first", bodies)
    ranks[0].transport.send(1, b"")
    ranks[1].gets(b"")
    assert ranks[1].heads == [(0, b"first"), (0, b"")]
    assert ranks[1].bodies == bodies


@pytest.mark.parametrize(
    "words",
    [
        b"",
        b"x" * 18,
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 4096,
        Initiator(b"o" * 32, 0, 1).hello,
        Initiator(KEY, 0, 1).hello[:7],
    ],
    ids=["silent", "18 bytes", "http", "ones", "hello", "part of a hello"],
)
def test_a_stranger_keeps_nobody_waiting(ranks: tuple[Rank, Rank], words: bytes) -> None:
    ranks[0].transport.send(1, b"before")
    ranks[1].gets(b"before")
    with ranks[1].connect() as stranger:
        stranger.sendall(words)
        ranks[1].transport.send(0, b"there")
        ranks[0].gets(b"there", 1)
        ranks[0].transport.send(1, b"after")
        ranks[1].gets(b"after")
    assert ranks[1].lost == []


def test_a_rank_that_stops_in_the_middle_of_a_message_keeps_nobody_waiting(ranks: tuple[Rank, Rank]) -> None:
    sock, writer = ranks[1].call(7)
    with sock:
        body = memoryview(bytes(1 << 20))
        sock.sendall(writer.frame(b"half", [body]) + body[: 1 << 19])
        ranks[0].transport.send(1, b"whole")
        ranks[1].gets(b"whole")
        assert ranks[1].lost == []
        sock.sendall(body[1 << 19 :])
        ranks[1].gets(b"half", 7)
    ranks[1].until(lambda: ranks[1].lost == [7])


def test_more_strangers_than_there_are_files_keep_no_rank_out(ranks: tuple[Rank, Rank]) -> None:
    with contextlib.ExitStack() as undo:
        for _ in range(300):
            undo.enter_context(ranks[1].connect())
        ranks[0].transport.send(1, b"here")
        ranks[1].gets(b"here")
        assert len(ranks[1].transport._unauthenticated) <= 64


def test_a_peer_with_another_key_is_refused_with_the_reason(ranks: tuple[Rank, Rank]) -> None:
    other = Rank(2, b"o" * 32)
    other.meet(ranks[1])
    with pytest.raises(
        HandshakeError, match=r"Rank 1, at 127.0.0.1:\d+, does not have this job's key.*SMDDP_JOB_SECRET"
    ):
        other.transport.send(1, b"not for you")
    other.transport.close()
    ranks[0].transport.send(1, b"here")
    ranks[1].gets(b"here")
    assert ranks[1].heads == [(0, b"here")]
    assert ranks[1].lost == []


def test_a_head_that_was_changed_on_its_way_is_not_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "is_loopback", lambda _: False)  # as between hosts
    rank = Rank(1)
    rank.meet()
    sock, writer = rank.call(7)
    with sock:
        first, second = writer.frame(b"right", []), bytearray(writer.frame(b"changed", []))
        second[-1] ^= 1
        sock.sendall(first + second)
        rank.until(lambda: rank.lost == [7])
    assert rank.heads == [(7, b"right")]
    rank.transport.close()


def test_it_listens_at_the_address_that_it_is_given_and_no_other() -> None:
    rank = Rank(0)
    outside = own_address("192.0.2.1")  # which is nobody's
    if outside.startswith("127."):
        pytest.skip("this machine has no other address")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((outside, rank.transport.port), LIMIT_S)
    rank.transport.close()


def test_a_rank_that_takes_no_messages_ends_a_send_at_its_limit() -> None:
    sender = Rank(0, seconds=0.1)
    with socket.create_server((LOOPBACK, 0)) as listener:
        sender.transport.set_peers({1: (LOOPBACK, listener.getsockname()[1])})

        def answer() -> None:
            sock, _ = listener.accept()
            answer_handshake(sock, KEY, 1, time.monotonic() + LIMIT_S)
            kept.append(sock)

        kept: list[socket.socket] = []
        answering = threading.Thread(target=answer, daemon=True)
        answering.start()
        with pytest.raises(TimeoutError, match=r"rank 1 has taken no message for 0.1 s"):
            sender.transport.send(1, b"much", [bytes(64 << 20)])
        with pytest.raises(OSError, match="Broken pipe"):
            sender.transport.send(1, b"more")
    sender.transport.close()


def test_a_rank_that_only_sends_notices_that_the_other_ends(ranks: tuple[Rank, Rank]) -> None:
    """Who is called calls back, and its connection ends with it."""
    ranks[0].transport.send(1, b"here")
    deadline = time.monotonic() + LIMIT_S
    while not any(incoming.reader for incoming in list(ranks[0].transport._in.values())):
        assert time.monotonic() < deadline, "nobody has called back"
        time.sleep(0.01)
    ranks[1].transport.close()
    ranks[0].until(lambda: ranks[0].lost == [1])


def test_the_kernel_asks_an_idle_connection_whether_its_host_is_there(ranks: tuple[Rank, Rank]) -> None:
    ranks[0].transport.send(1, b"here")
    ranks[1].gets(b"here")
    for sock in (ranks[0].transport._out[1].sock, *(incoming.sock for incoming in ranks[1].transport._in.values())):
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        idle, apart, times = (
            sock.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle + apart * times == LOSS_SECONDS < 15


def test_until_the_other_rank_connects_back_its_host_must_acknowledge(ranks: tuple[Rank, Rank]) -> None:
    """Afterwards the connection back ends if its host is lost, and a rank that reads nothing is waited for."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        ranks[0].transport.set_peers({2: (LOOPBACK, listener.getsockname()[1])})
        accepted: list[socket.socket] = []

        def answer() -> None:
            accepted.append(listener.accept()[0])
            answer_handshake(accepted[0], KEY, 2, time.monotonic() + LIMIT_S)

        threading.Thread(target=answer, daemon=True).start()
        ranks[0].transport.send(2, b"here")
    assert user_timeout(ranks[0], 2) == 1000 * LOSS_SECONDS
    ranks[0].transport.send(1, b"here")
    ranks[1].gets(b"here")
    ranks[1].transport.send(0, b"back")
    ranks[0].gets(b"back", 1)
    assert user_timeout(ranks[0], 1) == user_timeout(ranks[1], 0) == 0


def user_timeout(rank: Rank, to: int) -> int:
    return rank.transport._out[to].sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)


@pytest.mark.long
@pytest.mark.skipif(bool(UNAVAILABLE), reason=UNAVAILABLE)
def test_a_lost_host_is_noticed_by_senders_and_receivers(tmp_path: Path) -> None:
    """Rank 0 sends all the time, and never gets anything; rank 1 waits. Both prove themselves by a secret."""
    with two_hosts(tmp_path) as hosts:
        started = [start(host, rank, hosts[0].address) for rank, host in enumerate(hosts)]
        with running(*started):
            assert line(started[1]) == "rank 1 has a message"
            cut(hosts[0])
            for rank, process in enumerate(started):
                assert line(process) == f"rank {rank} has lost rank {1 - rank}"
                assert process.wait(LIMIT_S) == 0


def start(host: Host, rank: int, master: str) -> subprocess.Popen[bytes]:
    launch = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    environ = {**clean_environment(), **{name: str(value) for name, value in launch.items()}}
    environ |= {"MASTER_ADDR": master, "MASTER_PORT": "29500", "SMDDP_JOB_SECRET": "0123456789abcdef"}
    command = host.command(sys.executable, str(ACROSS_HOSTS))
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE)


def line(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode().strip()
