"""The engine itself, without a framework: processes that share memory, and what happens when one is lost."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.repeats import SEED, times

from smdistributed.core import shm_engine
from smdistributed.core.diagnostics import CollectiveError
from smdistributed.core.flat import Flat
from smdistributed.core.members import exchange_members
from smdistributed.core.segment import Process, this_process
from smdistributed.core.shm_engine import ShmEngine, open_shm_engine

SECONDS = 60.0


class DirectoryStore:
    """A file for each value."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def set(self, key: str, value: str, /) -> None:
        unfinished = self._directory / f".{key}"
        unfinished.write_text(value)
        unfinished.replace(self._directory / key)

    def add(self, key: str, amount: int, /) -> int:
        raise NotImplementedError

    def get(self, key: str, /) -> bytes:
        path = self._directory / key
        while not path.exists():
            time.sleep(0.001)
        return path.read_bytes()


def join(directory: Path, rank: int, size: int) -> ShmEngine:
    store = DirectoryStore(directory)
    members = exchange_members(store, rank, size)
    assert not any(member.problem for member in members)
    found = open_shm_engine(store, rank, members, SECONDS)
    assert isinstance(found, ShmEngine), found
    return found


def forked(size: int, run: Callable[[int], None]) -> list[int]:
    """Start `run(rank)` in processes; their numbers. A rank exits 0 when it returns."""
    started = []
    for rank in range(size):
        pid = os.fork()
        if not pid:
            code = 1
            try:
                run(rank)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        started.append(pid)
    return started


def exit_code(pid: int, seconds: float) -> int | None:
    """None: it has not ended by then, and is killed."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def for_ever(shared: ShmEngine, seed: int) -> None:
    drawn = random.Random(seed)
    room = (ctypes.c_float * 400_000)()
    address, rank, size = ctypes.addressof(room), shared.rank, shared.size
    while True:
        count = drawn.choice((0, 1, 1000, 100_000, 400_000))
        kind = drawn.randrange(4)
        flat = Flat(address, count, "float32")
        if kind == 0:
            shared.all_reduce(flat, "avg", drawn.randrange(-1, size))
        elif kind == 1:
            shared.broadcast(flat, drawn.randrange(size))
        elif kind == 2:
            parts = flat.chunk(size)
            shared.gather(parts[rank], parts)
        else:
            shared.barrier()


@pytest.mark.soak
@pytest.mark.parametrize("trial", range(SEED, SEED + times(8, 100)))
def test_a_rank_killed_at_any_moment_is_named_by_all_others(tmp_path: Path, trial: int) -> None:
    def run(rank: int) -> None:
        shared = join(tmp_path, rank, 3)
        (tmp_path / f"up-{rank}").touch()
        try:
            for_ever(shared, trial)
        except CollectiveError as error:
            assert f"rank 1 (process {ranks_pid()}) ended" in str(error), error

    def ranks_pid() -> int:
        return int((tmp_path / "lost").read_text())

    ranks = forked(3, run)
    (tmp_path / "lost").write_text(str(ranks[1]))
    while not all((tmp_path / f"up-{rank}").exists() for rank in range(3)):
        time.sleep(0.001)
    time.sleep(random.Random(trial).uniform(0, 0.03))  # anywhere
    os.kill(ranks[1], signal.SIGKILL)
    assert exit_code(ranks[1], 30) == -signal.SIGKILL
    assert [exit_code(pid, 30) for pid in (ranks[0], ranks[2])] == [0, 0]
    assert not list(left_behind())


def test_two_hundred_groups_leave_nothing(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        gc.collect()  # what other tests have left open would be closed at some later cycle
        seen = []
        for cycle in range(200):
            directory = tmp_path / str(cycle)
            directory.mkdir(exist_ok=True)
            shared = join(directory, rank, 2)
            value = ctypes.c_float(rank + 1)
            shared.all_reduce(Flat(ctypes.addressof(value), 1, "float32"), "sum")
            assert value.value == 3
            shared.close()
            seen.append((len(list(Path("/proc/self/fd").iterdir())), threading.active_count()))
            if cycle in (20, 199):
                seen.append((resident(), 0))
        (descriptors, threads), (early, _), (late, _) = seen[-2], seen[21], seen[-1]
        assert (descriptors, threads) == seen[0]
        assert late - early < 4 << 20, "a group's memory is 3 MB"

    for pid in forked(2, run):
        assert exit_code(pid, 60) == 0
    assert not list(left_behind())


def test_what_a_killed_job_has_left_is_removed_by_the_next(tmp_path: Path) -> None:
    ended = os.fork()
    if not ended:
        os._exit(0)
    os.waitpid(ended, 0)
    namespace = Path("/proc/self/ns/pid").readlink().name.strip("pid:[]")
    left = Path(f"/dev/shm/smddp-{namespace}-{ended}-12345-leftover")
    left.write_bytes(bytes(10))
    shared = join(tmp_path, 0, 1)
    assert not left.exists()
    shared.close()


class OverwrittenStore(DirectoryStore):
    """Somebody else writes into it which file it is."""

    word = ""

    def get(self, key: str, /) -> bytes:
        return self.word.encode() if key == "path" else super().get(key)


def test_rank_0_removes_no_file_that_the_store_names(tmp_path: Path) -> None:
    store, kept = OverwrittenStore(tmp_path), tmp_path / "kept"
    kept.touch()
    store.word = f"4096:{kept}"
    shared = open_shm_engine(store, 0, exchange_members(store, 0, 1), SECONDS)
    assert isinstance(shared, ShmEngine)
    shared.close()
    assert kept.exists()
    assert not list(Path("/dev/shm").glob(f"smddp-*-{os.getpid()}-*"))


@pytest.mark.parametrize("name", ["kept", "smddp-kept", "smddp-link", "smddp-short", "none"])
@pytest.mark.parametrize("slot", ["", "1", "x"])
def test_no_other_file_is_taken_for_shared_memory(tmp_path: Path, name: str, slot: str) -> None:
    """Ranks would write into it."""
    store, (largest, length) = OverwrittenStore(tmp_path), shm_engine.choose_slot_bytes(2)
    for other, size, mode in (("kept", length, 0o600), ("smddp-kept", length, 0o644), ("smddp-short", 1, 0o600)):
        with (tmp_path / other).open("wb") as file:
            file.truncate(size)
        (tmp_path / other).chmod(mode)
    (tmp_path / "smddp-link").symlink_to(tmp_path / "kept")
    store.word = f"{slot or largest}:{tmp_path / name}"
    memory, _, problem, _ = shm_engine._map(store, 1, 2)
    assert memory is None
    assert problem


def test_after_an_error_nothing_begins(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        shared = join(tmp_path, rank, 2)
        shared.seconds = 0.5
        for _ in range(2):
            if rank == 0:
                with pytest.raises(CollectiveError, match="did not reach barrier"):
                    shared.barrier()
        store = DirectoryStore(tmp_path)
        if rank == 0:
            store.set("tried", "twice")
        store.get("tried")
        shared.close()
        with pytest.raises(CollectiveError, match="the group was closed"):
            shared.barrier()

    assert [exit_code(pid, 20) for pid in forked(2, run)] == [0, 0]


def test_a_process_number_used_again_is_another_process() -> None:
    here = this_process()
    assert here.is_alive
    assert not here._replace(started=here.started - 1).is_alive
    assert Process(here.pid, 1, "another host", here.namespace).is_alive, "what cannot be seen from here"


def resident() -> int:
    """Bytes of this process's own memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def left_behind() -> Iterator[Path]:
    """The files of processes that have ended."""
    for path in Path("/dev/shm").glob("smddp-*"):
        if not Path("/proc", path.name.split("-")[2]).exists():
            yield path


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two CPUs are needed to bind two ranks apart")
@pytest.mark.parametrize("apart", [True, False])
def test_ranks_spin_while_they_wait_if_they_have_a_cpu_each(tmp_path: Path, apart: bool) -> None:
    """As plain mpirun binds them."""
    cpus = sorted(os.sched_getaffinity(0))

    def run(rank: int) -> None:
        os.sched_setaffinity(0, {cpus[rank if apart else 0]})
        shared = join(tmp_path, rank, 2)
        assert shared.spins == apart
        shared.barrier()

    assert [exit_code(pid, 60) for pid in forked(2, run)] == [0, 0]
