"""The runs of all jobs that the selected tests look at, several at a time."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from shoal import docker_client
from shoal.matrix.spec import BuildSpec

from ..tested_images import PYTORCH_CPU
from . import lab, oracle
from .compare import SAME, Pair, compare
from .divergences import DIVERGENCES, Divergence
from .lab import Run
from .layout import NONE, PYTORCH, TENSORFLOW, Tree
from .recordings import Recordings
from .trees import TREES

# The stock toolkit sleeps for half a minute after each MPI job; the others keep a processor busy.
SLEEPING, BUSY = 6, 2
# One worker of pytest-xdist has all jobs: they run side by side already, and the last test looks at all of them.
in_one_worker = pytest.mark.xdist_group("conformance")
SMALL_PYTORCH = PYTORCH_CPU
_SUMMARY = pytest.StashKey[list[str]]()


class Images(NamedTuple):
    """The images of the two toolkits, by framework toolkit."""

    stock: Mapping[str, str]
    ours: Mapping[str, str]


@pytest.fixture(scope="session")
def images(matrix: BuildSpec) -> Images:
    """Our images, which exist (`make conformance` builds them), and the oracles on top of them, made here."""
    names = (SMALL_PYTORCH, TENSORFLOW)
    pytorch, tensorflow = (matrix.select(name).tag for name in names)
    stock_pytorch, stock_tensorflow = oracle.ensure(docker_client.connect(), matrix, *names)
    return Images(
        stock={NONE: stock_pytorch, PYTORCH: stock_pytorch, TENSORFLOW: stock_tensorflow},
        ours={NONE: pytorch, PYTORCH: pytorch, TENSORFLOW: tensorflow},
    )


class Compared(NamedTuple):
    """A job's two runs, the number of compared items, and the differences, each with the divergence that intends it."""

    tree: Tree
    stock: Run
    ours: Run
    things: int
    differences: list[tuple[Pair, Divergence | None]]


class Laboratory:
    """Runs jobs through both toolkits, ahead of the tests that ask for them."""

    def __init__(self, images: Images, make_directory: Callable[[str], Path]) -> None:
        self._images, self._make_directory, self.recordings = images, make_directory, Recordings()
        # Not threads: the client of Docker reads the environment, which pytest changes from test to test.
        processes = multiprocessing.get_context("forkserver")
        processes.set_forkserver_preload([lab.__name__])
        self._sleeping, self._busy = (ProcessPoolExecutor(many, processes) for many in (SLEEPING, BUSY))
        self._runs: dict[str, tuple[Future[Run], Future[Run]]] = {}

    def start(self, tree: Tree) -> None:
        """Begin a job with both toolkits, unless that has been done."""
        if tree.name not in self._runs:
            directory = self._make_directory(tree.name)
            # Ours waits for no script to last. Its launchers start the ranks; ranks that are forked see the same:
            # tests/toolkit/test_forked_ranks.py.
            quick = tree._replace(environ={"RECORD_SECONDS": "0", "SHOAL_STANDBY": "0", **tree.environ})
            ours = self._busy.submit(lab.run, self._images.ours[tree.framework], quick, directory / "ours")
            self._runs[tree.name] = (self._stock(tree, directory / "stock"), ours)

    def _stock(self, tree: Tree, directory: Path) -> Future[Run]:
        image = self._images.stock[tree.framework]
        recorded = self.recordings.find(image, tree)
        if recorded:
            return recorded
        pool = self._sleeping if tree.uses_mpi else self._busy
        run = pool.submit(lab.run, image, tree, directory)
        self.recordings.will_be(image, tree, run)
        return run

    def compare(self, tree: Tree) -> Compared:
        """Wait for a job's runs, and lay them side by side."""
        self.start(tree)
        stock, ours = (future.result() for future in self._runs[tree.name])
        pairs = compare(stock, ours)
        differences = [(pair, _intended(tree, pair)) for pair in pairs if pair.kind != SAME]
        return Compared(tree, stock, ours, len(pairs), differences)

    def close(self) -> None:
        """Runs the started jobs to their end, and no others."""
        for pool in (self._sleeping, self._busy):
            pool.shutdown(cancel_futures=True)


def _intended(tree: Tree, difference: Pair) -> Divergence | None:
    return next((entry for entry in DIVERGENCES if entry.covers(tree.name, difference)), None)


@pytest.fixture(scope="session")
def laboratory(
    request: pytest.FixtureRequest, images: Images, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Laboratory]:
    """The laboratory, at work on all jobs that the selected tests ask for."""
    made = Laboratory(images, tmp_path_factory.mktemp)
    for tree in _wanted(request.session.items):
        made.start(tree)
    yield made
    made.close()
    if request.session.testsfailed:
        made.recordings.forget()
    else:
        made.recordings.keep()


def _wanted(items: list[pytest.Item]) -> list[Tree]:
    selected = [item for item in items if isinstance(item, pytest.Function)]
    calls = [item.callspec.params for item in selected if hasattr(item, "callspec")]
    named = [tree for call in calls if isinstance(tree := call.get("tree"), Tree)]
    return [*named, *TREES] if any("every_job" in item.fixturenames for item in selected) else named


@pytest.fixture
def compared(laboratory: Laboratory, tree: Tree) -> Compared:
    """The test's job, compared."""
    return laboratory.compare(tree)


@pytest.fixture
def every_job(request: pytest.FixtureRequest, laboratory: Laboratory) -> list[Compared]:
    """All jobs of the table, compared."""
    jobs = [laboratory.compare(tree) for tree in TREES]
    request.config.stash[_SUMMARY] = summary(jobs)
    return jobs


def summary(jobs: list[Compared]) -> list[str]:
    """Returns a summary of the comparison."""
    found = [entry for job in jobs for entry in job.differences]
    intended = [divergence for _, divergence in found if divergence]
    return [
        f"{len(jobs)} jobs ran through the stock toolkit and through ours; {sum(job.things for job in jobs):,} things "
        "of them were compared.",
        f"{len(found):,} differ: {len(intended):,} on purpose, by {len(set(intended))} of the {len(DIVERGENCES)} "
        f"entries in divergences.py, and {len(found) - len(intended):,} that are not listed.",
    ]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in config.stash.get(_SUMMARY, []):
        terminalreporter.write_line(f"conformance: {line}")
