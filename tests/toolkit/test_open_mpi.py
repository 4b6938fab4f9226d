"""Jobs under Open MPI 5.0, and users' options on two hosts under both series. More tests of 4.1 are in test_mpi.py
and test_two_hosts.py."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from . import openmpi
from .conftest import Finished, Run, Tree
from .netns import UNAVAILABLE, Host, running, send, two_hosts
from .test_two_hosts import MEET, UP, script, until
from .test_two_hosts import run as run_hosts

pytestmark = pytest.mark.mpi
TWO = pytest.mark.skipif(bool(UNAVAILABLE), reason=UNAVAILABLE)
LIBRARY = "print(comm.allreduce(1), MPI.Get_library_version().split(',')[0])"
OPTIONS = (
    "-verbose -x GREETING='hello there' --mca btl_vader_single_copy_mechanism none -mca plm_rsh_no_tree_spawn 1 "
    "--mca oob_tcp_if_include eth0 --mca btl self,vader,tcp -bind-to none --debug-daemons --debug-daemons-file "
    "--report-bindings --display-map --timeout 60 --prefix /nowhere --output-filename out"
)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    with two_hosts(tmp_path) as made:
        yield made


def test_ranks_of_one_host_meet(tree: Tree, run: Run) -> None:
    tree.script(f"{MEET}{LIBRARY}")
    tree.hyperparameters(sagemaker_mpi_enabled=True, sagemaker_mpi_num_of_processes_per_host=2)
    done = run(SAGEMAKER_PROGRAM="train.py", **openmpi.variables())
    assert done.code == 0, done.err
    assert sorted(line.partition("] ")[2] for line in done.out.splitlines()) == [f"2 Open MPI v{openmpi.VERSION}"] * 2


@pytest.mark.parametrize("series", [4, 5])
def test_a_scripts_own_mpirun_starts_a_rank_for_each_emulated_gpu(tree: Tree, run: Run, series: int) -> None:
    """As published launchers do, on a machine with fewer cores than the instance has GPUs."""
    ranks = (os.cpu_count() or 1) + 1
    rehearsal = {
        "SHOAL_REHEARSE": "1",
        "SHOAL_REHEARSE_GPUS": str(ranks),
        "OMPI_MCA_plm_rsh_agent": "ssh:rsh:/bin/false",
    }
    own = openmpi.variables() if series == 5 else {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    tree.script(f"mpirun --allow-run-as-root -np {ranks} sh -c 'echo rank $OMPI_COMM_WORLD_RANK'", "go.sh")
    tree.hyperparameters()  # without any, train would start a rank for each GPU itself
    done = run(SAGEMAKER_PROGRAM="go.sh", **own, **rehearsal)
    assert done.code == 0, done.err
    assert sorted(done.out.splitlines()) == sorted(f"rank {rank}" for rank in range(ranks))


@pytest.mark.parametrize("end", ["raise SystemExit(42)", "import os; os._exit(42)", "comm.Abort(42)"])
def test_the_failing_ranks_code_is_the_jobs(tree: Tree, run: Run, end: str) -> None:
    tree.script(f"{MEET}if comm.rank == 1: {end}\ncomm.Barrier()")
    tree.hyperparameters(sagemaker_mpi_enabled=True, sagemaker_mpi_num_of_processes_per_host=2)
    assert run(SAGEMAKER_PROGRAM="train.py", **openmpi.variables()).code == 42
    assert "rank 1 on " in tree.failure
    assert "exited with code 42" in tree.failure


@TWO
def test_ranks_of_two_hosts_meet_and_each_knows_its_own(hosts: list[Host]) -> None:
    text = f"{MEET}import os\nprint(comm.allreduce(1), os.environ['LOCAL_RANK'], os.environ['SM_CURRENT_HOST'])"
    script(hosts, text, sagemaker_mpi_num_of_processes_per_host=2)
    first, worker = run_5(hosts)
    assert first.code == 0, first.err + worker.err
    assert sorted(first.out.splitlines()) == [
        "[0,algo-1] 4 0 algo-1",
        "[1,algo-1] 4 1 algo-1",
        "[2,algo-2] 4 0 algo-2",
        "[3,algo-2] 4 1 algo-2",
    ]


@TWO
def test_a_failing_rank_ends_both_hosts_with_its_exception(hosts: list[Host]) -> None:
    script(hosts, f"{MEET}if comm.rank == 1: raise ValueError('boom')\ncomm.Barrier()")
    assert run_5(hosts)[0].code == 1
    for host in hosts:
        assert host.tree.failure.startswith("ValueError: boom\nrank 1 on algo-2 exited with code 1")


@TWO
@pytest.mark.parametrize("series", [4, 5])
def test_data_parallel_ranks_may_outnumber_the_cores(hosts: list[Host], series: int) -> None:
    keys = {"sagemaker_mpi_enabled": False, "sagemaker_distributed_dataparallel_enabled": True}
    script(hosts, f"{MEET}print(comm.allreduce(1))", **keys, sagemaker_mpi_num_of_processes_per_host=3)
    first, worker = run_5(hosts) if series == 5 else run_hosts(hosts)
    assert first.code == 0, first.err + worker.err
    assert [line.partition("] ")[2] for line in first.out.splitlines()] == ["6"] * 6


@TWO
def test_what_a_killed_job_leaves_disturbs_no_later_one(hosts: list[Host]) -> None:
    """As in containers that are started again: the same files, and the same PIDs."""
    script(hosts, f"{UP}time.sleep(60)")
    for _ in range(2):
        processes = [host.start(**openmpi.variables()) for host in hosts]
        with running(*processes):
            until(hosts[0].file("out"), "up", 2)
            for process in processes:
                process.kill()
    script(hosts, "print('trained')")
    assert [done.code for done in run_5(hosts)] == [0, 0]


@TWO
def test_sigterm_reaches_every_rank(hosts: list[Host]) -> None:
    stop = "def stop(*_):\n    open('saved', 'w').close(); sys.exit(0)\nsignal.signal(15, stop)\n"
    script(hosts, f"{UP}{stop}print('ready')\ntime.sleep(60)")
    processes = [host.start(**openmpi.variables()) for host in hosts]
    with running(*processes):
        until(hosts[0].file("out"), "ready", 2)
        send(processes[1], signal.SIGTERM)
        assert [host.finished(process).code for host, process in zip(hosts, processes)] == [143, 143]
    assert all((host.tree.code / "saved").exists() for host in hosts)


@TWO
@pytest.mark.parametrize("series", [4, 5])
def test_users_options_in_either_spelling_on_two_hosts(hosts: list[Host], series: int) -> None:
    text = f"{MEET}import os\nprint(comm.allreduce(1), os.environ['GREETING'])"
    script(hosts, text, sagemaker_mpi_custom_mpi_options=OPTIONS)
    first, worker = run_5(hosts) if series == 5 else run_hosts(hosts)
    assert first.code == 0, first.err + worker.err
    assert {"[0,algo-1] 2 hello there", "[1,algo-2] 2 hello there"} <= set(first.out.splitlines())
    renamed = "--mca btl_vader_single_copy_mechanism none is smsc ^cma,knem,xpmem in Open MPI 5.0, installed here"
    assert (renamed in first.err) == (series == 5)


@TWO
def test_hosts_with_different_series_are_reported(hosts: list[Host]) -> None:
    """The worker has 4.1 alone."""
    script(hosts, "print('trained')")
    processes = [hosts[0].start(**openmpi.variables()), hosts[1].start()]
    with running(*processes):
        done = [host.finished(process) for host, process in zip(hosts, processes)]
    assert done[0].code == done[1].code != 0
    assert "prted, which the first host's mpirun needs here, is not on PATH or next to Python" in hosts[0].tree.failure


def run_5(hosts: list[Host]) -> list[Finished]:
    return run_hosts(hosts, **openmpi.variables())
