"""The backend `smddp` of torch.distributed, on real ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.library.conftest import clean_environment

if TYPE_CHECKING:
    from tests.library.conftest import Mpirun

RANKS = Path(__file__).parent / "ranks"
ADDRESS = {"MASTER_ADDR": "127.0.0.1"}
BY_RANK = 'SMDDP_HOST=$((OMPI_COMM_WORLD_RANK{by})) exec "$0" "$@"'


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("world_size", "engine", "reason"),
    [
        (1, "shm", "shm: 1 rank on one host"),
        (2, "shm", "shm: 2 ranks on one host"),
        (3, "shm", "shm: 3 ranks on one host"),
        (2, "gloo", "gloo: SMDDP_ENGINE asks for it"),
    ],
)
def test_every_collective(mpirun: Mpirun, world_size: int, engine: str, reason: str) -> None:
    said = mpirun(world_size, RANKS / "smddp.py", SMDDP_ENGINE=engine)
    assert said.count(reason) == world_size  # not by lines: mpirun mixes those of several ranks
    assert not _left_behind()


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("world_size", "by", "reason"),
    [
        (4, "/2", "shm+gloo: 2 hosts × 2 ranks"),
        (4, "%2", "shm+gloo: 2 hosts × 2 ranks"),  # the ranks of a host are not in a row
        (3, "%2", "gloo: the hosts hold different numbers of ranks"),
    ],
)
def test_several_hosts(mpirun: Mpirun, free_port: int, world_size: int, by: str, reason: str) -> None:
    hosts = ["-c", _exec_as_rank(BY_RANK.format(by=by)), RANKS / "smddp.py"]
    said = mpirun(world_size, *hosts, MASTER_PORT=str(free_port), **ADDRESS)
    assert said.count(reason) == world_size
    assert not _left_behind()


@pytest.mark.parametrize("milliseconds", [0, 10])
def test_a_rank_that_is_killed_is_named_by_the_others(free_port: int, milliseconds: int) -> None:
    common = {**clean_environment(), **ADDRESS, "MASTER_PORT": str(free_port), "WORLD_SIZE": "3", "SMDDP_ENGINE": "shm"}
    command = [sys.executable, str(RANKS / "smddp_lost.py")]
    with ExitStack() as undo:
        environments = [{**common, "RANK": rank} for rank in "012"]
        ranks = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for env in environments]
        for rank in ranks:
            undo.enter_context(rank)
            undo.callback(rank.kill)
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "up\n"
        time.sleep(milliseconds / 1000)  # anywhere within a collective
        ranks[1].kill()
        said = [rank.communicate(timeout=5)[0] for rank in (ranks[0], ranks[2])]
    assert all(f"rank 1 (process {ranks[1].pid}) ended" in text for text in said), said
    assert not _left_behind()


@pytest.mark.mpi
def test_an_engine_that_there_is_not(mpirun: Mpirun) -> None:
    with pytest.raises(AssertionError, match="SMDDP_ENGINE='smh' is not an engine: use one of auto, shm, gloo"):
        mpirun(1, RANKS / "smddp.py", SMDDP_ENGINE="smh")


def _exec_as_rank(script: str) -> str:
    """Python that lets a shell name this rank's host, and becomes Python again."""
    return f"import os, sys; os.execvp('sh', ['sh', '-c', {script!r}, sys.executable, *sys.argv[1:]])"


def _left_behind() -> list[str]:
    """The files of shared memory of processes that have ended."""
    names = (path.name.split("-") for path in Path("/dev/shm").glob("smddp-*"))
    return ["-".join(name) for name in names if not os.path.exists(f"/proc/{name[1]}")]  # noqa: PTH110
