"""Ranks and hosts that die, hang or never come, and networks that fail: the others must not wait for them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from . import scripts
from .cases import EITHER_HOST, LOST_CODE, WHICH, launchers
from .job import MPI, PROCESS, TORCHRUN, Launcher
from .scripts import TRAIN_A_LITTLE, TRAIN_FOR_LONG, TRAIN_TOGETHER, script
from .start import StartJob
from .table import LOST, Table


@launchers(PROCESS, MPI, TORCHRUN)
def test_a_killed_rank_ends_every_host(start: StartJob, table: Table, launcher: Launcher) -> None:
    one_dies = "if RANK == 1:\n    mark('dies'); os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(300)\n"
    job = start(script(one_dies), launcher)
    since = job.marks("dies", 1)[1]
    table.failed("a rank is killed (SIGKILL)", job, since, codes=137, says="was killed by signal 9 (SIGKILL)")


@EITHER_HOST
@launchers(PROCESS, MPI, soak=(TORCHRUN,))
def test_a_killed_host_ends_the_other(start: StartJob, table: Table, launcher: Launcher, host: str) -> None:
    job = start(TRAIN_FOR_LONG, launcher)
    job.up()
    since = time.time()
    job.container(host).kill("KILL")
    codes = {**dict.fromkeys(WHICH, LOST_CODE), host: 137}
    fault = f"{WHICH[host]} is killed (`docker kill`)"
    table.failed(fault, job, since, codes=codes, says=f"host {host} was lost", silent=[host])


@pytest.mark.parametrize(
    ("launcher", "program", "host", "code", "says"),
    [
        (MPI, "/mpirun", "algo-1", 137, "mpirun was killed"),
        (MPI, "/orted", "algo-2", 205, "lost communication with a remote daemon"),
        (TORCHRUN, "torch.distributed.run", "algo-2", 137, "torch_distributed on algo-2 was killed"),
    ],
    ids=["mpirun", "orted", "torchrun"],
)
def test_a_killed_launcher_ends_every_host(
    start: StartJob, table: Table, launcher: Launcher, program: str, host: str, code: int, says: str
) -> None:
    job = start(TRAIN_FOR_LONG, launcher, SHOAL_STANDBY="0")  # forked ranks have no process of torchrun
    job.up()
    since = job.kill(host, program)
    table.failed(f"`{program.strip('/')}` is killed on {WHICH[host]}", job, since, codes=code, says=says)


@EITHER_HOST
def test_a_killed_train_ends_every_host(start: StartJob, table: Table, host: str) -> None:
    job = start(TRAIN_FOR_LONG)
    job.up()
    since = job.kill(host, "/train")
    codes = {**dict.fromkeys(WHICH, LOST_CODE), host: 137}
    fault = f"`train` itself is killed on {WHICH[host]}, under its PID 1"
    table.failed(fault, job, since, codes=codes, says=f"host {host} was lost", silent=[host])


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        ("algo-1", "The first host algo-1 has not connected within 3 s"),
        ("algo-2", "After 3 s these hosts are missing: algo-2"),
    ],
)
@launchers(MPI, soak=(PROCESS,))
def test_a_host_that_never_starts_is_named(
    start: StartJob, table: Table, launcher: Launcher, missing: str, says: str
) -> None:
    (present,) = set(WHICH) - {missing}
    job = start(TRAIN_FOR_LONG, launcher, only=[present], SHOAL_HOSTS_TIMEOUT="3")
    fault = f"{WHICH[missing]} never starts (from the end of SHOAL_HOSTS_TIMEOUT)"
    table.failed(fault, job, job.started(present) + 3, codes=1, says=says)


@EITHER_HOST
def test_of_a_host_started_twice_one_takes_part(start: StartJob, table: Table, host: str) -> None:
    """Which of the two is up to the name server. The other one waits until its limit."""
    twins = [host, "again"]
    job = start(TRAIN_A_LITTLE, only=[*WHICH, "again"], named={"again": host}, SHOAL_HOSTS_TIMEOUT="8")
    job.up()
    (left_over,) = (name for name, end in job.ends().items() if end.code and name in twins)
    trained = job.ends(sorted({*WHICH, "again"} - {left_over}))
    assert {end.code for end in trained.values()} == {0}
    assert all(end.success for end in trained.values())
    (other,) = set(WHICH) - {host}
    fault = f"{WHICH[host]} is started twice: the one too many (from the end of SHOAL_HOSTS_TIMEOUT)"
    table.failed(fault, job, job.started(left_over) + 8, codes={left_over: 1}, says=other)


@launchers(MPI, soak=(PROCESS,))
def test_a_network_that_stumbles_is_survived(start: StartJob, table: Table, launcher: Launcher) -> None:
    job = start(TRAIN_TOGETHER[launcher.name], launcher)
    since = job.up() + 9
    assert job.cut("algo-2", 5) < since - 5
    # TCP itself tries again only as long after the cut as the cut has lasted.
    table.survived("the network is cut for 5 s (`ip link set eth0 down`)", job, since)


@EITHER_HOST
@launchers(MPI, soak=(PROCESS,))
def test_a_network_cut_for_good_ends_both_hosts(start: StartJob, table: Table, launcher: Launcher, host: str) -> None:
    job = start(TRAIN_FOR_LONG, launcher)
    job.up()
    since = job.cut(host)
    fault = f"the network of {WHICH[host]} is cut for good (`ip link set eth0 down`)"
    table.failed(fault, job, since, codes=LOST_CODE, says="was lost: it was silent for", bar=LOST)


def test_a_disconnected_host_ends_both(start: StartJob, table: Table) -> None:
    job = start(TRAIN_FOR_LONG)
    job.up()
    since = start.disconnect(job.hosts["algo-2"])
    fault = "a worker leaves the network (`docker network disconnect`)"
    table.failed(fault, job, since, codes=LOST_CODE, says="was lost: it was silent for", bar=LOST)


def test_a_network_that_works_one_way_ends_both_hosts(start: StartJob, table: Table) -> None:
    job = start(TRAIN_FOR_LONG)
    job.up()
    since = job.mislead("algo-2", "algo-1")
    fault = "packets arrive in one direction only"
    table.failed(fault, job, since, codes=LOST_CODE, says="was lost", bar=LOST)


def test_a_host_frozen_for_five_seconds_is_waited_for(start: StartJob, table: Table) -> None:
    job = start(TRAIN_TOGETHER["MPI"])
    since = job.up() + 9
    job.container("algo-2").pause()
    time.sleep(5)
    job.container("algo-2").unpause()
    table.survived("a host is frozen for 5 s (`docker pause`)", job, since)


@EITHER_HOST
def test_a_frozen_host_ends_the_other_and_then_itself(start: StartJob, table: Table, host: str) -> None:
    job = start(TRAIN_FOR_LONG)
    job.up()
    (other,) = set(WHICH) - {host}
    since = time.time()
    job.container(host).pause()
    says = "was lost: it was silent for"
    table.failed(f"{WHICH[host]} is frozen (`docker pause`)", job, since, codes={other: LOST_CODE}, says=says, bar=LOST)
    since = time.time()
    job.container(host).unpause()
    table.failed(f"{WHICH[host]} is thawed after that", job, since, codes={host: LOST_CODE}, says="was lost")


@pytest.fixture
def slow_names(start: StartJob, tmp_path: Path) -> dict[Path, str]:
    """The resolv.conf of hosts with a name server that takes 3 s for each answer."""
    server = start.beside("python", "-c", scripts.SLOW_DNS, "3")
    server.engines.reload()
    (network,) = server.engines.attrs["NetworkSettings"]["Networks"].values()
    file = tmp_path / "resolv.conf"
    file.write_text(f"nameserver {network['IPAddress']}\n")
    return {file: "/etc/resolv.conf"}


@launchers(MPI, TORCHRUN, soak=(PROCESS,))
def test_slow_names_are_survived(
    start: StartJob, table: Table, slow_names: dict[Path, str], launcher: Launcher
) -> None:
    job = start(TRAIN_A_LITTLE, launcher, options={name: {"volumes": slow_names} for name in WHICH})
    table.survived("every look-up of a name takes 3 s", job, job.up() + 2)


def test_slow_names_do_not_hold_up_the_end(start: StartJob, table: Table, slow_names: dict[Path, str]) -> None:
    options = {"algo-1": {"volumes": slow_names}}
    job = start(TRAIN_FOR_LONG, only=["algo-1"], options=options, SHOAL_HOSTS_TIMEOUT="2")
    fault = "a host never starts, and a look-up takes longer than SHOAL_HOSTS_TIMEOUT (from its end)"
    table.failed(fault, job, job.started("algo-1") + 2, codes=1, says="algo-2 (looking up its name)")
