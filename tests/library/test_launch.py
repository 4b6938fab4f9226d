"""The launch environment: what each launcher sets is read, and what cannot be true is refused by name."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from smdistributed.core.launch import Address, Launch, LaunchError, read_launch, set_torch_environment

NAMED = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
MASTER = {"MASTER_ADDR": "algo-1", "MASTER_PORT": "7777"}
SERVER = {"SMDATAPARALLEL_SERVER_ADDR": "algo-1", "SMDATAPARALLEL_SERVER_PORT": "7592"}


def mpi(rank: int, size: int, local_rank: int, local_size: int) -> dict[str, str]:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    values = (rank, size, local_rank, local_size)
    environ = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in zip(names, values)}
    return {**environ, "PMIX_SERVER_TMPDIR": "/tmp/ompi/1"}


def test_not_launched_is_a_job_of_one() -> None:
    assert read_launch({"MASTER_ADDR": "algo-1"}) == Launch(
        launched=False, rank=0, world_size=1, local_rank=0, local_world_size=1, master=None, session_dir=None
    )


def test_torchrun() -> None:
    assert read_launch({**NAMED, **MASTER}) == Launch(
        launched=True,
        rank=5,
        world_size=8,
        local_rank=1,
        local_world_size=4,
        master=Address("algo-1", 7777),
        session_dir=None,
    )


def test_bare_mpirun_on_one_host() -> None:
    assert read_launch(mpi(1, 2, 1, 2)) == Launch(
        launched=True,
        rank=1,
        world_size=2,
        local_rank=1,
        local_world_size=2,
        master=None,
        session_dir=Path("/tmp/ompi/1"),
    )


def test_mpirun_on_several_hosts_has_no_common_directory() -> None:
    launch = read_launch({**mpi(5, 8, 1, 4), **SERVER})
    assert (launch.master, launch.session_dir) == (Address("algo-1", 7592), None)


def test_master_comes_before_the_data_parallel_server() -> None:
    assert read_launch({**NAMED, **SERVER, **MASTER}).master == Address("algo-1", 7777)


def test_mpirun_fills_in_what_the_toolkit_leaves_out() -> None:
    launch = read_launch({"RANK": "5", "WORLD_SIZE": "8", **mpi(5, 8, 1, 4)})
    assert (launch.local_rank, launch.local_world_size) == (1, 4)


def test_local_rank_by_the_data_parallel_name() -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "2", "SMDATAPARALLEL_LOCAL_RANK": "1"}
    launch = read_launch(environ)
    assert (launch.local_rank, launch.local_world_size) == (1, None)
    assert read_launch({**environ, "LOCAL_RANK": "0"}).local_rank == 0


def test_a_local_rank_left_over_in_the_shell_does_not_beat_mpirun() -> None:
    assert read_launch({**mpi(1, 2, 1, 2), "LOCAL_RANK": "0"}).local_rank == 1


def test_a_launcher_inside_mpirun_decides() -> None:
    launch = read_launch({**mpi(1, 2, 0, 1), **NAMED})
    assert (launch.rank, launch.world_size, launch.local_rank, launch.session_dir) == (5, 8, 1, None)


# What `train` gives a script that it starts once on each of two hosts, the second of which this is.
PLAIN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", **MASTER}
ALONE = {**PLAIN, "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
HOSTS = {"SM_CURRENT_HOST_RANK": "1", "SM_HOST_COUNT": "2"}


@pytest.mark.parametrize("callers", [ALONE, {**PLAIN, **HOSTS}])
@pytest.mark.parametrize(("rank", "size"), [(0, 4), (3, 4), (1, 2)])
def test_a_scripts_own_mpirun_decides(callers: dict[str, str], rank: int, size: int) -> None:
    """As published launchers (`mpirun -np 4 python …` in a .sh) have it. The last place is as the plain one's."""
    launch = read_launch({**callers, **mpi(rank, size, rank, size)})
    assert (launch.rank, launch.world_size, launch.local_rank, launch.local_world_size) == (rank, size, rank, size)
    assert (launch.master, launch.session_dir) == (None, Path("/tmp/ompi/1")), "the other host's address is none here"


def test_what_train_gives_its_own_ranks_is_no_other_jobs() -> None:
    environ = {**PLAIN, **HOSTS, **mpi(1, 2, 0, 1)}
    assert read_launch(environ).master == Address("algo-1", 7777)
    by_torchrun = {**environ, **mpi(0, 1, 0, 1), "TORCHELASTIC_RUN_ID": "none"}
    assert (read_launch(by_torchrun).rank, read_launch(by_torchrun).world_size) == (1, 2)


def test_torch_finds_the_place_that_a_scripts_own_mpirun_gives(tmp_path: Path) -> None:
    environ = {**ALONE, **mpi(0, 4, 0, 4), "PMIX_SERVER_TMPDIR": str(tmp_path)}
    set_torch_environment(environ)
    named = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}
    assert {name: environ[name] for name in named} == named
    assert environ["MASTER_PORT"] == (tmp_path / "smdistributed-port").read_text()
    assert read_launch(environ).master == Address("127.0.0.1", int(environ["MASTER_PORT"]))


@pytest.mark.parametrize("environ", [{**NAMED, **MASTER}, {**mpi(5, 8, 1, 4), **MASTER, "LOCAL_RANK": "7"}])
def test_the_local_rank_has_the_name_that_transformers_reads(environ: dict[str, str]) -> None:
    set_torch_environment(environ)
    assert (environ["SMDATAPARALLEL_LOCAL_RANK"], environ["LOCAL_RANK"]) == ("1", "1")
    assert environ["MASTER_ADDR"] == "algo-1"


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "1"}, "RANK=1 is set, but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is set, but RANK is not"),
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK=0 is set, but RANK and WORLD_SIZE are not"),
        ({"SMDATAPARALLEL_LOCAL_RANK": "0"}, "SMDATAPARALLEL_LOCAL_RANK=0 is set, but RANK"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_RANK=0 is set, but OMPI_COMM_WORLD_SIZE is not"),
        ({**NAMED, "RANK": "five"}, "RANK='five' is not an integer. Allowed: from 0 to 7"),
        ({**NAMED, "RANK": ""}, "RANK='' is not an integer"),
        ({**NAMED, "RANK": "8"}, "RANK=8 is out of range. Allowed: from 0 to 7"),
        ({**NAMED, "RANK": "-1"}, "RANK=-1 is out of range"),
        ({**NAMED, "WORLD_SIZE": "0"}, "WORLD_SIZE=0 is out of range. Allowed: 1 or more"),
        ({**NAMED, "LOCAL_RANK": "4"}, "LOCAL_RANK=4 is out of range. Allowed: from 0 to 3"),
        ({**NAMED, "LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9 is out of range. Allowed: from 1 to 8"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "rank 0 of 2, but its local rank is missing. Fix: set LOCAL_RANK"),
        ({**NAMED, "MASTER_ADDR": "algo-1"}, "MASTER_ADDR=algo-1 is set, but MASTER_PORT is not"),
        ({**NAMED, **MASTER, "MASTER_PORT": "99999"}, "MASTER_PORT=99999 is out of range. Allowed: from 1 to 65535"),
        ({**mpi(1, 3, 1, 3), "RANK": "0", "WORLD_SIZE": "2"}, "RANK=0 WORLD_SIZE=2 contradict mpirun"),
        ({**mpi(1, 2, 1, 2), "RANK": "0", "WORLD_SIZE": "2"}, "unset RANK and WORLD_SIZE before you call mpirun"),
    ],
)
def test_bad_environment_is_refused_by_name(environ: dict[str, str], words: str) -> None:
    with pytest.raises(LaunchError) as error:
        read_launch(environ)
    assert words in str(error.value)


def test_a_port_for_the_ranks_stays_free_for_them() -> None:
    """No other process can take it before a server of theirs listens on it, on whatever addresses."""
    environ = mpi(0, 1, 0, 1)
    del environ["PMIX_SERVER_TMPDIR"]
    set_torch_environment(environ)
    port = int(environ["MASTER_PORT"])
    with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
        other.bind(("127.0.0.1", port))
    everywhere: dict[str, Any] = {"family": socket.AF_INET6, "dualstack_ipv6": True}
    for address, options in (("127.0.0.1", {}), ("", {}), ("", everywhere)):
        with socket.create_server((address, port), **options):
            pass
