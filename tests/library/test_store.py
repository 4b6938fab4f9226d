"""The store where ranks meet without torch: values over TCP, and the error when a rank does not come."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from smdistributed.core import store as stores
from smdistributed.core.launch import Address, Launch, LaunchError
from smdistributed.core.secret import sign, verify
from smdistributed.core.sockets import own_address
from smdistributed.core.store import (
    JobStore,
    LocalStore,
    PrefixedStore,
    Server,
    StoreError,
    StoreLog,
    TcpStore,
    open_store,
)


def launch(rank: int, size: int, master: Address | None, session_dir: Path | None = None) -> Launch:
    return Launch(True, rank, size, rank, size, master, session_dir)


@pytest.fixture
def outside() -> str:
    """An address by which other hosts reach this one."""
    found = own_address("192.0.2.1")  # which is nobody's
    if found.startswith("127."):
        pytest.skip("this machine has no other address")
    return found


@pytest.fixture
def server() -> Iterator[Server]:
    served = Server(0)
    yield served
    served.close()


@pytest.fixture
def store(server: Server) -> Iterator[TcpStore]:
    opened = TcpStore(Address("127.0.0.1", server.port), seconds=10)
    yield opened
    opened.close()


@pytest.fixture(params=["local", "tcp"])
def either(request: pytest.FixtureRequest) -> JobStore:
    found: JobStore = LocalStore(10) if request.param == "local" else request.getfixturevalue("store")
    return found


def test_the_store_keeps_values_and_counts(either: JobStore) -> None:
    either.set("a", "1 — ä\n")
    assert either.get("a") == "1 — ä\n".encode()
    either.set("a", "")
    assert either.get("a") == b""
    assert [either.add("n", amount) for amount in (2, 0, -5)] == [2, 2, -3]
    assert either.get("n") == b"-3"
    either.set("large", "x" * 3_000_000)
    assert len(either.get("large")) == 3_000_000


def test_parts_have_keys_of_their_own(either: JobStore) -> None:
    part = either.prefixed("part")
    part.set("a", "1")
    either.set("a", "2")
    part.prefixed("of").set("a", "3")
    assert (part.get("a"), either.get("part/a"), either.get("part/of/a")) == (b"1", b"1", b"3")
    assert PrefixedStore(either, "other").add("n", 1) == 1


def test_a_log_is_kept_in_the_store(either: JobStore) -> None:
    log = StoreLog(either, "log")
    assert [log.append("list", {"word": word}) for word in "ab"] == [1, 2]
    assert log.read("list", after=1) == [{"word": "b"}]
    assert [log.count("ready", amount) for amount in (2, 3)] == [2, 5]
    assert log.count("ready") == 5


def test_a_thread_that_waits_keeps_no_other_from_asking(either: JobStore) -> None:
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(either.get, f"late-{number}") for number in range(8)]
        time.sleep(0.05)
        for number in range(8):
            assert either.add("n", 1) == number + 1
            either.set(f"late-{number}", str(number))
        assert [each.result() for each in waiting] == [b"%d" % number for number in range(8)]


def test_sums_of_many_threads(either: JobStore) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(lambda _: either.add("n", 1), range(200))) == list(range(1, 201))


def test_a_value_that_no_rank_sets(server: Server) -> None:
    store = TcpStore(Address("127.0.0.1", server.port), seconds=0.1)
    with pytest.raises(
        StoreError, match=rf"No rank has set 'rank-1' in the store at 127.0.0.1:{server.port} within 0 s"
    ):
        store.get("rank-1")
    store.set("rank-1", "here")  # the same connection goes on
    assert store.get("rank-1") == b"here"
    with pytest.raises(StoreError, match="No rank has set 'rank-1'"):
        LocalStore(0.01).get("rank-1")


def test_ranks_that_come_before_rank_0(free_port: int) -> None:
    place = Address("127.0.0.1", free_port)
    with ThreadPoolExecutor(2) as pool:
        early = [pool.submit(open_store, launch(rank, 3, place)) for rank in (1, 2)]
        time.sleep(0.2)
        first = open_store(launch(0, 3, place))
        first.set("a", "1")
        assert [each.result(10).get("a") for each in early] == [b"1"] * 2
    first.close()
    assert isinstance(first, TcpStore)


def test_in_the_session_directory_when_there_is_no_address(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(open_store, launch(1, 2, None, tmp_path))
        first = open_store(launch(0, 2, None, tmp_path))
        assert first.add("n", 1) + second.result(10).add("n", 1) == 3
    first.close()


def test_a_rank_that_cannot_reach_the_store_is_an_error_with_the_address(
    free_port: int, monkeypatch: pytest.MonkeyPatch, server: Server
) -> None:
    with pytest.raises(LaunchError, match=r"the address where the ranks meet is missing\. Fix: set MASTER_ADDR"):
        open_store(launch(0, 2, None))
    with pytest.raises(LaunchError, match=f"another process of this host uses port {server.port}"):
        open_store(launch(0, 2, Address("127.0.0.1", server.port)))
    monkeypatch.setattr(stores, "CONNECT_SECONDS", 0.1)
    with pytest.raises(StoreError, match=f"No store listens at 127.0.0.1:{free_port}"):
        open_store(launch(1, 2, Address("127.0.0.1", free_port)))


def test_a_store_that_has_ended_is_reported_as_gone(server: Server, store: TcpStore) -> None:
    store.set("a", "1")
    waiting = ThreadPoolExecutor(1).submit(store.get, "never")
    time.sleep(0.05)
    server.close()
    with pytest.raises(StoreError, match="is unreachable: rank 0"):
        waiting.result()
    with pytest.raises(StoreError, match=r"is unreachable: rank 0|No store listens"):
        store.get("a")


@pytest.mark.parametrize(
    "sent", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, struct.pack("!I", 2) + b"{}", struct.pack("!I", 6) + b'["no"]']
)
def test_what_is_no_request_ends_its_own_connection_only(server: Server, store: TcpStore, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), 5) as stranger:
        stranger.sendall(sent)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    assert store.add("n", 1) == 1


def test_one_rank_needs_no_address() -> None:
    assert isinstance(open_store(launch(0, 1, None)), LocalStore)


def refused(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), 5).close()
    except ConnectionRefusedError:
        return True
    return False


def test_a_job_of_one_host_is_out_of_reach_of_others(outside: str, free_port: int) -> None:
    """Even when MASTER_ADDR is an address that they reach."""
    store = open_store(launch(0, 2, Address(outside, free_port)))
    assert open_store(launch(1, 2, Address(outside, free_port))).add("n", 1) == 1
    assert refused(outside, free_port)
    store.close()
    assert refused("127.0.0.1", free_port), "rank 0 has closed it"


def test_on_a_machine_without_ipv6_all_its_addresses_serve_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    server = Server(0, "")
    for address in ("127.0.0.1", "127.0.0.2"):
        assert TcpStore(Address(address, server.port)).add(address, 1) == 1
    server.close()


def test_other_hosts_reach_it_at_the_jobs_address_alone(outside: str, free_port: int) -> None:
    first = dataclasses.replace(launch(0, 2, Address(outside, free_port)), local_world_size=1)
    store = open_store(first)
    assert TcpStore(Address(outside, free_port)).add("n", 1) == 1
    assert refused("127.0.0.1", free_port)
    store.close()


def test_the_address_of_a_host_that_knows_its_own_name_as_its_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "own_address", {"first": "127.0.1.1", "localhost": "::1"}.__getitem__)
    monkeypatch.delenv("SM_NETWORK_INTERFACE_NAME", raising=False)
    assert stores._job_address("first") == "", "all: which one is unknown"
    assert stores._job_address("localhost") == "::1", "which no other host can mean"
    assert stores._job_address("127.0.1.1") == "127.0.1.1"
    monkeypatch.setenv("SM_NETWORK_INTERFACE_NAME", "lo")
    assert stores._job_address("first") == "127.0.0.1"


def test_a_pickle_that_was_changed_on_its_way_is_not_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects that ranks broadcast by MPI, which nobody authenticates."""
    monkeypatch.delenv("SHOAL_JOB_SECRET", raising=False)
    monkeypatch.delenv("SMDDP_JOB_SECRET", raising=False)
    assert sign(b"pickle", "objects") == b"pickle" == verify(b"pickle", "objects")
    monkeypatch.setenv("SMDDP_JOB_SECRET", "of this job, long enough")
    sent = sign(b"pickle", "objects")
    assert verify(sent, "objects") == b"pickle"
    for changed in (b"", b"pickle", sent[:-1], sent + b".", sent[:-1] + b"E", bytes(32) + b"pickle"):
        with pytest.raises(ValueError, match="was changed in transit"):
            verify(changed, "objects")
    with pytest.raises(ValueError, match="was changed in transit"):
        verify(sent, "another purpose")


def test_without_the_jobs_secret_no_peer_gets_an_answer(free_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Address("127.0.0.1", free_port)
    monkeypatch.setenv("SMDDP_JOB_SECRET", "0123456789abcdef")
    first = open_store(launch(0, 2, place))
    assert open_store(launch(1, 2, place)).add("n", 1) == 1
    for secret in ("", "fedcba9876543210"):
        monkeypatch.setenv("SMDDP_JOB_SECRET", secret)
        with pytest.raises(StoreError, match=r"is not this job's store, or has another secret .*SMDDP_JOB_SECRET"):
            open_store(launch(1, 2, place))
    with socket.create_connection(("127.0.0.1", free_port), 5) as stranger:
        request = b'["get", "a", 0]'
        stranger.sendall(struct.pack("!I", len(request)) + request)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    first.close()


def test_a_system_that_gives_no_more_threads_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers may have them all: their connections are ended, and the store goes on."""
    refusals, start = iter(range(3)), threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if next(refusals, None) is not None:
            raise RuntimeError("can't start new thread")
        start(thread)

    listener = socket.create_server(("127.0.0.1", 0))
    stores._Service(listener, stores._NO_SECRET)
    monkeypatch.setattr(stores, "CONNECT_SECONDS", 5.0)
    monkeypatch.setattr(stores, "_GRACE_SECONDS", 1.0)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with socket.create_connection(listener.getsockname(), 5) as stranger:
        assert stranger.recv(1) == b""
    store = TcpStore(Address("127.0.0.1", listener.getsockname()[1]), seconds=1)
    store.set("a", "1")
    assert store.get("a") == b"1"
    assert next(refusals, None) is None
    store.close()


def test_endless_strangers_do_not_block_it(server: Server) -> None:
    with contextlib.ExitStack() as undo:
        for _ in range(300):
            undo.enter_context(socket.create_connection(("127.0.0.1", server.port), 5))
        store = TcpStore(Address("127.0.0.1", server.port))
        assert store.add("n", 1) == 1
        store.close()
