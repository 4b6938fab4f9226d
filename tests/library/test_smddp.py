"""The backend `smddp` of torch.distributed, on real ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest
import torch
from tests.library.conftest import clean_environment

if TYPE_CHECKING:
    from tests.library.conftest import Mpirun, Python

RANKS = Path(__file__).parent / "ranks"
ADDRESS = {"MASTER_ADDR": "127.0.0.1"}
BY_RANK = 'SMDDP_HOST=$((OMPI_COMM_WORLD_RANK{by})) SMDDP_ENGINE={engine} exec "$0" "$@"'


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("world_size", "engine", "reason"),
    [
        pytest.param(1, "shm", "shm: 1 rank on one host", marks=pytest.mark.once),
        # With the oldest torch, tests/integration/test_library.py has it on two hosts with two ranks each.
        pytest.param(2, "shm", "shm: 2 ranks on one host", marks=pytest.mark.once),
        pytest.param(3, "shm", "shm: 3 ranks on one host", marks=pytest.mark.once),
        pytest.param(2, "gloo", "gloo: requested by SMDDP_ENGINE", marks=pytest.mark.once),
    ],
)
def test_every_collective(mpirun: Mpirun, world_size: int, engine: str, reason: str) -> None:
    output = mpirun(world_size, RANKS / "smddp.py", SMDDP_ENGINE=engine)
    assert output.count(reason) == world_size  # not by lines: mpirun mixes those of several ranks
    assert not _left_behind()


@pytest.mark.long
@pytest.mark.once  # tests/integration/test_library.py has it over two containers
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("world_size", "by", "engine", "reason"),
    [
        (4, "%2", "auto", "shm+gloo: 2 hosts × 2 ranks"),  # the ranks of a host are not in a row
        (3, "%2", "auto", "gloo: the hosts have different numbers of ranks"),
        (4, "/2", "mpi", "shm+mpi: 2 hosts × 2 ranks"),
    ],
)
def test_several_hosts(mpirun: Mpirun, free_port: int, world_size: int, by: str, engine: str, reason: str) -> None:
    hosts = ["-c", _exec_as_rank(BY_RANK.format(by=by, engine=engine)), RANKS / "smddp.py"]
    output = mpirun(world_size, *hosts, MASTER_PORT=str(free_port), **ADDRESS)
    assert output.count(reason) == world_size
    assert not _left_behind()


class Guarded(Protocol):
    def __call__(
        self, what: str, world_size: int = 2, ranks_per_host: int = 0, seconds: float = 60, **environ: str
    ) -> list[str]: ...


@pytest.fixture
def guarded(python: Python, free_port: int) -> Guarded:
    """Run smddp_guards.py; what each rank has printed. A stopped rank is ended when the others have.

    ranks_per_host: 0: all. seconds: the group's timeout.
    """

    def run(what: str, world_size: int = 2, ranks_per_host: int = 0, seconds: float = 60, **environ: str) -> list[str]:
        common = {**clean_environment(), **ADDRESS, "MASTER_PORT": str(free_port), "WORLD_SIZE": str(world_size)}
        command = [*python(**environ), str(RANKS / "smddp_guards.py"), what]
        with ExitStack() as undo:
            own = [{"SECONDS": str(seconds), "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]
            for number, environment in enumerate(own):
                if ranks_per_host:
                    environment["SMDDP_HOST"] = f"host-{number // ranks_per_host}"
            ranks = [
                subprocess.Popen(command, env={**common, **environ, **mine}, stdout=subprocess.PIPE, text=True)
                for mine in own
            ]
            for rank in ranks:
                undo.enter_context(rank)
                undo.callback(rank.kill)
            first = ranks[0].communicate(timeout=60)[0]
            if what in ("stopped", "interrupted"):
                ranks[1].kill()
            return [first, *(rank.communicate(timeout=60)[0] for rank in ranks[1:])]

    return run


@pytest.mark.long
@pytest.mark.once
def test_a_late_rank_is_named_with_what_it_does(guarded: Guarded) -> None:
    first, second = guarded("late", seconds=3)
    assert "SMDDPError: rank 1 (process " in first
    assert "did not reach all_reduce of float32 with sum, 40 bytes" in first
    assert "within 3 s, the group's timeout" in first
    assert "Rank 1 last called no collective yet. Its main thread is at:" in first
    assert "in dawdle\n    time.sleep(seconds)" in first
    assert "SMDDPError: Another rank aborted" in second
    assert "It reports: rank 0: rank 1 (process " in second


@pytest.mark.once
def test_a_waiting_rank_prints_a_warning_before_it_fails(guarded: Guarded) -> None:
    first, second = guarded("late_but_in_time", SMDDP_STALL_SECONDS="0.5")
    assert first.count("smddp: rank 1") == 1
    assert "in dawdle\n" in first
    assert first.endswith("reduced\n")
    assert second == "up\nreduced\n"


@pytest.mark.long
@pytest.mark.once
def test_a_stopped_rank_does_not_answer(guarded: Guarded) -> None:
    first, second = guarded("stopped", seconds=3)
    assert "It does not answer: it may be stopped." in first
    assert second == "up\nstopping\n"


@pytest.mark.once
def test_ranks_that_call_different_collectives_are_reported(guarded: Guarded) -> None:
    errors = guarded("apart", world_size=3)
    assert all("SMDDPError: " in text for text in errors)
    apart = [text for text in errors if "Ranks called different collectives: " in text]
    assert apart
    assert "all_reduce of float32 with sum, 40 bytes" in apart[0]
    assert "broadcast with root 0, 20 bytes" in apart[0]


@pytest.mark.once
def test_ranks_that_diverged_earlier_are_reported(guarded: Guarded) -> None:
    errors = guarded("apart_earlier")
    assert any("Ranks called different collectives before this one: " in text for text in errors)
    assert all("SMDDPError: " in text for text in errors)


@pytest.mark.long
@pytest.mark.once
@pytest.mark.parametrize(("world_size", "ranks_per_host"), [(2, 1), (4, 2)])
def test_a_late_rank_of_another_host_is_named_by_all(guarded: Guarded, world_size: int, ranks_per_host: int) -> None:
    for error in guarded("last_is_late", world_size, ranks_per_host, seconds=3):
        assert f"rank {world_size - 1} (process " in error
        assert "on host-1) did not reach all_reduce of float32 with sum, 40 bytes (collective 1 of the group)" in error
        assert "within 3 s, the group's timeout" in error
        assert f"Rank {world_size - 1} last called no collective yet. Its main thread is at:" in error
        assert "in dawdle\n    time.sleep(seconds)" in error


@pytest.mark.once
def test_a_wait_for_another_host_is_printed_in_the_logs_of_both(guarded: Guarded) -> None:
    first, second = guarded("late_but_in_time", ranks_per_host=1, SMDDP_STALL_SECONDS="0.5")
    assert first.count("smddp: rank 1 (process ") == 1
    assert second.count("smddp: rank 0 reports: rank 1 (process ") == 1
    assert "in dawdle\n" in first
    assert first.endswith("reduced\n")
    assert second.endswith("reduced\n")


@pytest.mark.once
def test_a_late_bucket_is_named_between_hosts(guarded: Guarded) -> None:
    first, _ = guarded("late_in_backward", ranks_per_host=1, SMDDP_STALL_SECONDS="0.5")
    assert "smddp: rank 1 (process " in first
    assert "The tensor is bucket " in first


@pytest.mark.once
@pytest.mark.parametrize(
    ("what", "calls"),
    [
        ("other_sizes", ("all_reduce of float32 with sum, 40 bytes", "all_reduce of float32 with sum, 80 bytes")),
        ("apart_earlier", ("broadcast with root 0, 20 bytes", "broadcast with root 1, 20 bytes")),
    ],
)
def test_hosts_that_call_different_collectives_are_reported(
    guarded: Guarded, what: str, calls: tuple[str, str]
) -> None:
    for error in guarded(what, ranks_per_host=1, seconds=3):
        assert "Ranks called different collectives: " in error
        assert all(call in error for call in calls)


@pytest.mark.once
def test_a_rank_of_another_host_that_has_ended_is_named(guarded: Guarded) -> None:
    first, _ = guarded("ended", ranks_per_host=1)
    assert "SMDDPError: rank 1 (process " in first
    assert "It does not answer" in first


@pytest.mark.long
@pytest.mark.once
@pytest.mark.mpi
def test_a_late_rank_is_named_on_mpi(mpirun: Mpirun, free_port: int) -> None:
    hosts = ["-c", _exec_as_rank(BY_RANK.format(by="", engine="mpi")), RANKS / "smddp_guards.py", "last_is_late"]
    output = mpirun(2, *hosts, MASTER_PORT=str(free_port), SECONDS="1", **ADDRESS)
    assert output.count("on 1) did not reach all_reduce of float32 with sum, 40 bytes") == 2
    assert "a message has not arrived" not in output


@pytest.mark.long
@pytest.mark.once
def test_an_interrupt_ends_the_wait(guarded: Guarded) -> None:
    first, _ = guarded("interrupted")
    assert first == "up\ninterrupted\n"


@pytest.mark.once
@pytest.mark.parametrize(
    ("what", "difference"),
    [
        ("another_model", "0.weight: (3, 2) float32 on rank 0, (4, 2) float32 on rank 1"),
        ("another_order", "parameter 0 is first on rank 0, second on rank 1: another order"),
    ],
)
def test_models_that_differ_are_refused_on_all_ranks(guarded: Guarded, what: str, difference: str) -> None:
    for error in guarded(what):
        assert "SMDDPError: The model of rank 1 differs from the model of rank 0:" in error
        assert difference in error


@pytest.mark.once
def test_diverging_weights_are_reported_if_the_check_is_on(guarded: Guarded) -> None:
    for error in guarded("weights_apart", SMDDP_CHECK_WEIGHTS="1"):
        assert "SMDDPError: The weights of rank 1 differ from the weights of rank 0:\n  bias: " in error
    assert all("went on" in error for error in guarded("weights_apart"))


def test_every_way_to_wait_for_a_handle_raises(guarded: Guarded) -> None:
    """torch's own handles do not. A future of torch has a type of its own for what was raised."""
    first, _ = guarded("ended_before_a_handle")
    raised = dict(line.split(": ") for line in first.splitlines()[1:])
    assert raised == {**dict.fromkeys(("handle", "no handle", "C++"), "SMDDPError"), "future": "RuntimeError"}


def test_a_failure_in_backward_names_the_bucket(guarded: Guarded) -> None:
    first, _ = guarded("ended_in_backward")
    assert "ended while rank 0 waited in all_reduce" in first
    assert "The tensor is bucket " in first
    assert "of the gradients (" in first


BY_NAME = """
import os, sys, warnings, torch.distributed as dist
from torch import nn, ones
warnings.simplefilter("error")
for backend in ("gloo", "cpu:smddp,cuda:nccl", "smddp"):
    # A file for each: in the store of torchrun, gloo may find the address of its group before.
    file = f"file://{os.path.dirname(__file__)}/{backend}"
    dist.init_process_group(backend, init_method=file, rank=int(os.environ["RANK"]), world_size=2)
    summed = ones(3)
    dist.all_reduce(summed)
    nn.parallel.DistributedDataParallel(nn.Linear(3, 1))(summed).sum().backward()
    print(f"{backend} {summed.tolist()} {'smdistributed.dataparallel' in sys.modules}\\n", end="")
    dist.destroy_process_group()
"""


@pytest.mark.once
@pytest.mark.mpi
def test_the_name_of_the_backend_is_enough(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(BY_NAME)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    ended = subprocess.run((*torchrun, script), capture_output=True, text=True, timeout=120)
    for line in (
        "gloo [2.0, 2.0, 2.0] False",
        "cpu:smddp,cuda:nccl [2.0, 2.0, 2.0] True",
        "smddp [2.0, 2.0, 2.0] True",
    ):
        assert ended.stdout.splitlines().count(line) == 2, ended.stderr


@pytest.mark.once
@pytest.mark.mpi
def test_a_missing_docker(mpirun: Mpirun) -> None:
    with pytest.raises(
        AssertionError, match=r"'smh' is not a communication engine\. Fix: use one of auto, shm, mpi, gloo"
    ):
        mpirun(1, RANKS / "smddp.py", SMDDP_ENGINE="smh")


@pytest.mark.once
@pytest.mark.mpi
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nccl_without_a_device_is_refused(mpirun: Mpirun) -> None:
    with pytest.raises(AssertionError, match=r"SMDDPNCCLError: SMDDP_ENGINE=nccl, but NCCL cannot carry .*: rank 0 "):
        mpirun(1, RANKS / "smddp.py", SMDDP_ENGINE="nccl")


def _exec_as_rank(script: str) -> str:
    """Python that lets a shell name this rank's host, and becomes Python again."""
    return f"import os, sys; os.execvp('sh', ['sh', '-c', {script!r}, *os.environ['PYTHON'].split(), *sys.argv[1:]])"


def _left_behind() -> list[str]:
    """The files of shared memory of processes that have ended."""
    names = (path.name.split("-") for path in Path("/dev/shm").glob("smddp-*"))
    return ["-".join(name) for name in names if not os.path.exists(f"/proc/{name[2]}")]  # noqa: PTH110
