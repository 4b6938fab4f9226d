"""What the fronts of model parallelism share, without any: rendezvous, objects between ranks, the job, splitting."""

from __future__ import annotations

import os
import pickle
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from smdistributed.core.launch import LaunchError
from smdistributed.core.store import LocalStore
from smdistributed.modelparallel.backend import api, context, rendezvous
from smdistributed.modelparallel.backend.config import check
from smdistributed.modelparallel.backend.context import Context, Grid
from smdistributed.modelparallel.backend.exceptions import MicrobatchError, SMPRuntimeError, StepUsageError
from smdistributed.modelparallel.backend.object_exchange import ObjectExchange
from smdistributed.modelparallel.backend.rendezvous import connect_ranks
from smdistributed.modelparallel.backend.splitting import ArgumentSplitter, merge
from smdistributed.modelparallel.backend.transport import Access, Transport


class Rank:
    """A front that sends pickles."""

    def __init__(self, store: LocalStore, rank: int, size: int) -> None:
        self.objects = ObjectExchange(rank, self._send, pickle.loads, 30)
        self._rank, self.store = rank, store
        self.transport = connect_ranks(store.prefixed("smp"), rank, size, "127.0.0.1", True, self._open)

    def _open(self, access: Access) -> Transport:
        self.access = access
        return Transport(self._rank, access, self._deliver, self.objects.lost)

    def _send(self, to: int, box: str, obj: object) -> None:
        self.transport.send(to, box.encode(), [pickle.dumps(obj)])

    def _deliver(self, source: int, head: bytes, bodies: list[bytearray]) -> None:
        self.objects.deliver(source, head.decode(), bodies[0])


@contextmanager
def met(size: int) -> Iterator[list[Rank]]:
    store, ranks = LocalStore(30.0), dict[int, Rank]()

    def join(rank: int) -> None:
        ranks[rank] = Rank(store, rank, size)

    in_threads(join, size)
    try:
        yield [ranks[rank] for rank in range(size)]
    finally:
        for each in ranks.values():
            each.transport.close()


def in_threads(work: Any, size: int) -> None:
    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


def test_ranks_that_have_met_exchange_objects_in_boxes_of_their_own() -> None:
    with met(3) as ranks:
        found: dict[int, list[Any]] = {}
        ranks[0].objects.send("later", 1, "box")
        ranks[0].objects.send(None, 1)
        in_threads(lambda rank: found.update({rank: ranks[rank].objects.gather(rank * 10, [0, 1, 2])}), 3)
        assert [found[rank] for rank in range(3)] == [[0, 10, 20]] * 3
        assert ranks[1].objects.receive(0) is None
        assert ranks[1].objects.receive(0, "box") == "later"
        with pytest.raises(SMPRuntimeError, match="Rank 2 sends to itself"):
            ranks[2].objects.send(1, 2)


def test_what_a_rank_has_sent_is_there_after_it_is_lost() -> None:
    with met(2) as ranks:
        ranks[0].objects.send("last", 1)
        ranks[0].transport.close()
        assert ranks[1].objects.receive(0) == "last"
        for _ in range(2):
            with pytest.raises(SMPRuntimeError, match="Rank 0: connection lost"):
                ranks[1].objects.receive(0)
        with pytest.raises(SMPRuntimeError, match="Rank 0: connection lost"):
            ranks[1].objects.send("too late", 0)


def test_a_missing_object_is_waited_for_until_the_limit() -> None:
    waiting = ObjectExchange(1, lambda *_: None, pickle.loads, 0.05)
    with pytest.raises(SMPRuntimeError, match=r"Rank 1 has waited 0.05 s for an object.*SMP_TIMEOUT_SECONDS"):
        waiting.receive(0)
    waiting.deliver(0, "", pickle.dumps("late"))
    assert waiting.receive(0) == "late"


def test_ranks_of_one_host_share_a_key_that_only_their_user_can_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store, which others may read, has nothing but the file's name; when all have read it, the file is gone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    modes = []
    read_key = rendezvous._read_key

    def reading(path: str, rank: int) -> bytes:
        modes.append(Path(path).stat().st_mode & 0o777)
        return read_key(path, rank)

    monkeypatch.setattr(rendezvous, "_read_key", reading)
    with met(2) as ranks:
        key, address = ranks[0].access
        assert ranks[1].access == (key, address)
        assert (len(key), address, modes) == (32, "127.0.0.1", [0o600] * 2)
        assert not any(key.hex() in word or key.decode("latin-1") in word for word in ranks[0].store._values.values())
        assert list(tmp_path.iterdir()) == []


def test_a_key_that_another_user_has_left_is_refused(tmp_path: Path) -> None:
    """Whoever reaches the store may have written the path there."""
    key, link = tmp_path / "key", tmp_path / "link"
    key.write_bytes(b"k" * 32)
    key.chmod(0o600)
    assert rendezvous._read_key(str(key), 1) == b"k" * 32
    link.symlink_to(key)
    key_of_others = Path("/proc/1/cmdline") if os.geteuid() else key
    if not os.geteuid():
        os.chown(key, 65534, -1)
    for path in (link, key_of_others, tmp_path / "none"):
        with pytest.raises(LaunchError, match=r"Rank 1 cannot read the key.*Fix: .*SMDDP_JOB_SECRET"):
            rendezvous._read_key(str(path), 1)


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    """Such as the arguments of a process of this user: 32 bytes that others know."""
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    for mode in (0o644, 0o640, 0o604):
        key.chmod(mode)
        with pytest.raises(LaunchError, match="others may read it"):
            rendezvous._read_key(str(key), 1)


@pytest.mark.parametrize("word", ["plain " + "00" * 32, "secret ", "none at all"])
def test_ranks_of_one_host_take_no_key_out_of_the_store(word: str) -> None:
    """Whoever reaches it may write there: a key that they know would make them a rank."""
    store = LocalStore(1.0)
    store.prefixed("smp").set("key", word)
    with pytest.raises(LaunchError, match=r"Rank 1 .*Fix: .*SMDDP_JOB_SECRET"):
        Rank(store, 1, 2)


def test_the_secret_of_the_launch_is_the_key_and_goes_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMDDP_JOB_SECRET", "a word of the launch")
    with met(2) as ranks:
        assert ranks[0].access.key == ranks[1].access.key != b"a word of the launch"
        kept = " ".join(ranks[0].store._values.values())
        assert "launch" not in kept
        assert ranks[0].access.key.hex() not in kept
    monkeypatch.setenv("SMDDP_JOB_SECRET", "short")
    with pytest.raises(LaunchError, match=r"SMDDP_JOB_SECRET has 5 characters: it must have 16 random ones or more"):
        Rank(LocalStore(1.0), 0, 1)


@pytest.mark.parametrize(
    ("mine", "says"), [("", "no job secret, and rank 0 has one"), ("s" * 32, "and rank 0 has none")]
)
def test_a_secret_that_only_some_ranks_have_is_an_error(monkeypatch: pytest.MonkeyPatch, mine: str, says: str) -> None:
    store = LocalStore(1.0)
    with ExitStack() as undo:
        monkeypatch.setenv("SMDDP_JOB_SECRET", "" if mine else "s" * 32)
        rendezvous._agree_on_key(store, 0, True, undo)
        monkeypatch.setenv("SMDDP_JOB_SECRET", mine)
        with pytest.raises(LaunchError, match=f"Rank 1 has .*{says}. Fix: .*-x SMDDP_JOB_SECRET"):
            rendezvous._agree_on_key(store, 1, True, undo)


def test_several_hosts_without_a_secret_get_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    store = LocalStore(1.0)
    with ExitStack() as undo:
        keys = [rendezvous._agree_on_key(store, rank, False, undo) for rank in (0, 1)]
    assert keys[0] == keys[1]
    errors = capsys.readouterr().err
    assert errors.count("several hosts without a secret") == 1
    assert "run code in it. Fix: set SMDDP_JOB_SECRET" in errors


def test_a_host_that_knows_its_own_name_as_its_loopback_is_found_by_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Debian's /etc/hosts has it: 127.0.1.1."""
    routes = {"first": "127.0.1.1", "192.0.2.2": "192.0.2.1"}
    monkeypatch.setattr(rendezvous, "own_address", routes.__getitem__)
    store = LocalStore(1.0)
    store.set("address 1", "192.0.2.2")
    assert rendezvous._address_for_peers(store, 0, 2, "first") == "192.0.2.1"
    store.set("address 1", "127.0.0.1")
    assert rendezvous._address_for_peers(store, 0, 2, "first") == "127.0.1.1"


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "_current", Context())


@pytest.mark.usefixtures("nobody")
@pytest.mark.parametrize(
    "ask", [api.rank, api.local_size, api.get_pp_group, api.barrier, lambda: api.send(1, 0), lambda: api.recv_from(0)]
)
def test_before_init_every_function_raises(ask: Any) -> None:
    assert not api.is_initialized()
    with pytest.raises(StepUsageError, match=r"smp.init\(\) has not been called"):
        ask()


@pytest.mark.usefixtures("nobody")
def test_the_job_that_has_begun_is_asked() -> None:
    mine = Context()
    mine.cfg = check({"partitions": 2, "ddp": True})
    mine.grid, mine.rank, mine.local_rank, mine.local_size = Grid.of(mine.cfg, 4), 3, 1, 2
    mine.begin()
    assert api.is_initialized()
    assert (api.rank(), api.size(), api.local_rank(), api.local_size()) == (3, 4, 1, 2)
    assert api.mp_rank() == api.get_mp_group().index(3)
    with pytest.raises(ValueError, match=r"PP_RANK 2 does not exist\. Allowed: 0 to 1"):
        api.send("word", 2, api.RankType.PP_RANK)


class Letters(str):
    """A tensor of one axis."""


class LetterSplitter(ArgumentSplitter):
    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, Letters)

    def shape(self, tensor: Letters) -> tuple[int, ...]:
        return (len(tensor),) if tensor else ()

    def cut(self, tensor: Letters, count: int, axis: int) -> list[Letters]:
        size = len(tensor) // count
        return [Letters(tensor[i * size : (i + 1) * size]) for i in range(count)]


def take(first: Any, *rest: Any, whole: Any = None) -> None: ...


def joined(parts: Sequence[Any]) -> str:
    return "+".join(parts)


def test_splitting_and_merging_ask_the_front_what_a_tensor_is() -> None:
    splitter = LetterSplitter(take, ["whole"], {})
    parts = splitter.split([{"a": [Letters("abcd"), "word"]}, Letters("xy")], {"whole": Letters("ab")}, 2)
    assert parts == [(({"a": ["ab", "word"]}, "x"), {"whole": "ab"}), (({"a": ["cd", "word"]}, "y"), {"whole": "ab"})]
    assert splitter.weights(parts) == [0.5, 0.5]
    with pytest.raises(MicrobatchError, match=r"rest, of shape \(3,\), has 3 along axis 0: that must be a multiple of"):
        splitter.split([Letters(), Letters("abc")], {}, 2)
    results = [args[0] for args, _ in parts]
    assert merge(results, splitter.is_tensor, joined) == {"a": ["ab+cd", ["word", "word"]]}
