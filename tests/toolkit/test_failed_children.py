"""Scripts without `if __name__ == "__main__":` that start processes by spawn, which then can't import the script."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from .conftest import Run, Tree
from .loopback import NAMES, started, two_trees

GUARD = 'below `if __name__ == "__main__":`'
AGAIN = "The processes that the script starts fail while they import the script, again and again."
EARLY = "RuntimeError: An attempt has been made to start a new process before the current process has finished its"
POOL = """
import multiprocessing
def double(x): return 2 * x
with multiprocessing.get_context("spawn").Pool(2) as pool:
    print(pool.map(double, range(4)))
"""
# One process: the lines of several can mix, and with those of the script.
EXECUTOR = """
import concurrent.futures, multiprocessing
with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
    print(*executor.map(abs, range(4)))
"""
PROCESS = """
import multiprocessing
process = multiprocessing.get_context("spawn").Process(target=print)
process.start()
process.join()
"""
MPI = {"sagemaker_mpi_enabled": True, "sagemaker_mpi_num_of_processes_per_host": 2}
TORCHRUN = {"sagemaker_torch_distributed_enabled": True, "sagemaker_mpi_num_of_processes_per_host": 2}


@pytest.mark.parametrize(
    "launcher",
    [{}, pytest.param(MPI, marks=pytest.mark.mpi), pytest.param(TORCHRUN, marks=pytest.mark.long)],
    ids=["process", "mpirun", "torchrun"],
)
def test_a_pool_that_starts_its_processes_for_ever_ends_the_job(
    tree: Tree, run: Run, launcher: dict[str, object]
) -> None:
    tree.script(POOL)
    tree.hyperparameters(**launcher)
    done = run(SAGEMAKER_PROGRAM="train.py", SHOAL_MAX_RESTARTS="1")
    assert done.code == 1
    head, who, *rest = tree.failure.splitlines()
    assert (head, "was killed by signal 9" in who) == (AGAIN, True)
    assert GUARD in rest[0]
    assert "It was not restarted" in rest[1]
    assert done.err.count("train: a process that the script started failed") == 1


def test_a_pool_on_a_worker_ends_the_job_on_all_hosts(tmp_path: Path) -> None:
    first, worker = two_trees(tmp_path)
    first.script("import time; time.sleep(600)")
    worker.script(POOL)
    with started([first, worker]) as trains:
        with ThreadPoolExecutor() as readers:  # both at once: a pool writes more than a pipe holds
            list(readers.map(lambda train: train.communicate(timeout=120), trains))
        assert [train.returncode for train in trains] == [1, 1]
    assert first.failure.startswith(f"On {NAMES[1]}: {AGAIN}\nrank 1 on {NAMES[1]} was killed")
    assert GUARD in worker.failure


def test_the_error_of_a_process_is_the_cause_of_its_parents_error(tree: Tree, run: Run) -> None:
    tree.script(EXECUTOR)
    assert run(SAGEMAKER_PROGRAM="train.py").code == 1
    assert tree.failure.startswith(EARLY)
    assert GUARD in tree.failure.splitlines()[2]


@pytest.mark.parametrize("is_guarded", [False, True])
def test_a_job_that_succeeds_without_its_process_has_a_hint(tree: Tree, run: Run, is_guarded: bool) -> None:
    start = 'if __name__ == "__main__":' + PROCESS.replace("\n", "\n    ") if is_guarded else PROCESS
    tree.script(start)
    done = run(SAGEMAKER_PROGRAM="train.py")
    assert (done.code, done.err.count(GUARD)) == (0, 0 if is_guarded else 1)
