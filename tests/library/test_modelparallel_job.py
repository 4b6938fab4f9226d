"""What the fronts of model parallelism share, without any: meeting, objects between ranks, the job, splitting."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from smdistributed.core.mail import Mail
from smdistributed.core.store import LocalStore
from smdistributed.modelparallel.backend import api, job
from smdistributed.modelparallel.backend.config import check
from smdistributed.modelparallel.backend.exceptions import MicrobatchError, SMPRuntimeError, StepUsageError
from smdistributed.modelparallel.backend.job import Job
from smdistributed.modelparallel.backend.meeting import meet
from smdistributed.modelparallel.backend.post import Post
from smdistributed.modelparallel.backend.ranks import Grid
from smdistributed.modelparallel.backend.splitting import Splitter, merge


class Rank:
    """A front that sends pickles."""

    def __init__(self, store: LocalStore, rank: int, size: int) -> None:
        self.post = Post(rank, self._send, pickle.loads)
        self._rank = rank
        self.mail = meet(store.prefixed("smp"), rank, size, "127.0.0.1", self._open)

    def _open(self, secret: bytes) -> Mail:
        return Mail(self._rank, secret, self._deliver, self.post.lost)

    def _send(self, to: int, box: str, obj: object) -> None:
        self.mail.send(to, box.encode(), [pickle.dumps(obj)])

    def _deliver(self, source: int, head: bytes, bodies: list[bytearray]) -> None:
        self.post.deliver(source, head.decode(), bodies[0])


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
            each.mail.close()


def in_threads(work: Any, size: int) -> None:
    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


def test_ranks_that_have_met_exchange_objects_in_boxes_of_their_own() -> None:
    with met(3) as ranks:
        found: dict[int, list[Any]] = {}
        ranks[0].post.send("later", 1, "box")
        ranks[0].post.send(None, 1)
        in_threads(lambda rank: found.update({rank: ranks[rank].post.gather(rank * 10, [0, 1, 2])}), 3)
        assert [found[rank] for rank in range(3)] == [[0, 10, 20]] * 3
        assert ranks[1].post.receive(0) is None
        assert ranks[1].post.receive(0, "box") == "later"
        with pytest.raises(SMPRuntimeError, match="Rank 2 sends to itself"):
            ranks[2].post.send(1, 2)


def test_what_a_rank_has_sent_is_there_after_it_is_lost() -> None:
    with met(2) as ranks:
        ranks[0].post.send("last", 1)
        ranks[0].mail.close()
        assert ranks[1].post.receive(0) == "last"
        for _ in range(2):
            with pytest.raises(SMPRuntimeError, match="Rank 0 is gone: its own error says why"):
                ranks[1].post.receive(0)


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_current", Job())


@pytest.mark.usefixtures("nobody")
@pytest.mark.parametrize(
    "ask", [api.rank, api.local_size, api.get_pp_group, api.barrier, lambda: api.send(1, 0), lambda: api.recv_from(0)]
)
def test_before_init_every_function_says_so(ask: Any) -> None:
    assert not api.is_initialized()
    with pytest.raises(StepUsageError, match=r"smp.init\(\) has not been called"):
        ask()


@pytest.mark.usefixtures("nobody")
def test_the_job_that_has_begun_is_asked() -> None:
    mine = Job()
    mine.cfg = check({"partitions": 2, "ddp": True})
    mine.grid, mine.rank, mine.local_rank, mine.local_size = Grid.of(mine.cfg, 4), 3, 1, 2
    mine.begin()
    assert api.is_initialized()
    assert (api.rank(), api.size(), api.local_rank(), api.local_size()) == (3, 4, 1, 2)
    assert api.mp_rank() == api.get_mp_group().index(3)
    with pytest.raises(ValueError, match="PP_RANK 2 is not there: they count from 0 to 1"):
        api.send("word", 2, api.RankType.PP_RANK)


class Letters(str):
    """A tensor of one axis."""


class LetterSplitter(Splitter):
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
