"""One rank of a job without torch: an engine for numpy's arrays, as a front for another framework opens it.

`without_torch.py RANKS_PER_HOST [late]`; late: the last rank does not come, and the others print their errors.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from smdistributed.core.diagnostics import CollectiveError
from smdistributed.core.engine_selection import RankGroup, open_engine
from smdistributed.core.engines import Engine
from smdistributed.core.flat import Flat
from smdistributed.core.launch import read_launch
from smdistributed.core.mpi import mpi_network
from smdistributed.core.native import supports_reduction
from smdistributed.core.store import open_store

LAUNCH = read_launch()
RANK, SIZE = LAUNCH.rank, LAUNCH.world_size
EVERYBODY = range(SIZE)
Array = np.ndarray[Any, Any]
COUNTS = (0, 1, 7, 1000, 20_003, 600_001)  # short, longer than a short message, and several pieces of float64
PIECES = 2_200_003  # the same of float16
NAMES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8", "int8")
REDUCTIONS: dict[str, Callable[[Array], Array]] = {
    "sum": lambda stacked: stacked.sum(0),
    "avg": lambda stacked: stacked.sum(0) / SIZE,
    "min": lambda stacked: stacked.min(0),
    "max": lambda stacked: stacked.max(0),
}


def encoded(numbers: Array, name: str) -> Array:
    """float64 as elements of a dtype; numpy has no bfloat16: the upper half of a float32."""
    if name == "bfloat16":
        return (np.ascontiguousarray(numbers, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return numbers.astype(name)  # integers towards zero


def flat(array: Array, name: str = "") -> Flat:
    return Flat(array.ctypes.data, array.size, name or str(array.dtype), array)


def given(rank: int, count: int) -> Array:
    """Small whole numbers: sums of them, and their averages over 2 or 4 ranks, are exact in every dtype."""
    lowest = -9 if SIZE < 5 else 0
    return np.random.default_rng(rank).integers(lowest, 10, count).astype(np.float64)


def all_reduce(engine: Engine) -> None:
    for count in (*COUNTS, PIECES):
        drawn = np.stack([given(rank, count) for rank in EVERYBODY])
        for name in NAMES if count < 100_000 else ("float16",) if count == PIECES else ("float32", "int64"):
            everybodys = np.abs(drawn) if name == "uint8" else drawn
            for op, reference in REDUCTIONS.items():
                array = encoded(everybodys[RANK], name)
                assert supports_reduction(name, op)
                engine.all_reduce(flat(array, name), op)
                assert np.array_equal(array, encoded(reference(everybodys), name)), (count, name, op)
    assert not supports_reduction("float32", "bxor")
    assert not supports_reduction("complex64", "sum")


def to_a_root(engine: Engine) -> None:
    for count in COUNTS:
        array = given(RANK, count)
        engine.all_reduce(flat(array), "sum", root=SIZE - 1)
        expected = sum(given(rank, count) for rank in EVERYBODY) if RANK == SIZE - 1 else given(RANK, count)
        assert np.array_equal(array, expected)


def broadcast(engine: Engine) -> None:
    for count in COUNTS:
        for root in EVERYBODY:
            array = encoded(given(RANK, count), "bfloat16")
            engine.broadcast(flat(array, "bfloat16"), root)
            assert np.array_equal(array, encoded(given(root, count), "bfloat16"))


def gather(engine: Engine) -> None:
    for count in COUNTS:
        for root in (-1, SIZE - 1):
            outputs = np.zeros((SIZE, count))
            engine.gather(flat(given(RANK, count)), rows(outputs) if root in (-1, RANK) else [], root)
            if root in (-1, RANK):
                assert np.array_equal(outputs, np.stack([given(rank, count) for rank in EVERYBODY]))


def scatter(engine: Engine) -> None:
    for count in COUNTS:
        inputs, output = table(0, count), np.zeros(count)
        engine.scatter(rows(inputs) if RANK == 0 else [], flat(output), 0)
        assert np.array_equal(output, table(0, count)[RANK])


def reduce_scatter(engine: Engine) -> None:
    for count in COUNTS:
        inputs, output = table(RANK, count), np.zeros(count)
        engine.reduce_scatter(rows(inputs), flat(output), "sum")
        assert np.array_equal(output, sum(table(rank, count)[RANK] for rank in EVERYBODY))


def all_to_all(engine: Engine) -> None:
    inputs = [given(RANK, 3 * rank + RANK) for rank in EVERYBODY]
    outputs = [np.zeros(3 * RANK + rank) for rank in EVERYBODY]
    engine.all_to_all(list(map(flat, inputs)), list(map(flat, outputs)))
    for rank, output in enumerate(outputs):
        assert np.array_equal(output, given(rank, 3 * RANK + rank))


def table(rank: int, count: int) -> Array:
    return given(rank, SIZE * count).reshape(SIZE, count)


def rows(array: Array) -> Sequence[Flat]:
    return [flat(row) for row in array]


def barrier(engine: Engine) -> None:
    engine.barrier()


def late(engine: Engine) -> None:
    if RANK == SIZE - 1:
        time.sleep(4)
    try:
        engine.all_reduce(flat(np.ones(10, np.float32)), "sum")
    except CollectiveError as error:
        print(error, flush=True)


CHECKS = (all_reduce, to_a_root, broadcast, gather, scatter, reduce_scatter, all_to_all, barrier)


def main(ranks_per_host: int, what: Sequence[str]) -> None:
    os.environ["SMDDP_HOST"] = f"host-{RANK // ranks_per_host}"
    store = open_store(LAUNCH)
    seconds = 2.0 if what else 100.0
    group = RankGroup(store.prefixed("engine"), RANK, SIZE, seconds, connect=lambda: store, number=RANK)
    engine, name = open_engine(group, mpi_network(group))
    print(name)
    for check in (late,) if what else CHECKS:
        try:
            check(engine)
        except Exception as error:
            raise AssertionError(f"{check.__name__} on rank {RANK}") from error
    engine.close()
    store.close()
    assert "torch" not in sys.modules


main(int(sys.argv[1]), sys.argv[2:])
