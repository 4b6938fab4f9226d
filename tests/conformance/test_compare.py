"""The comparison itself: it finds what differs, takes for one what is one, and no entry covers more than it says."""

from __future__ import annotations

import json

import pytest

from .commands import launch_command
from .compare import ADDITIONAL, DIFFERENT, MISSING, SAME, Pair, compare
from .divergences import DIVERGENCES, DOCUMENT, Divergence, with_table
from .lab import HostRun, Process

ENVIRON = {"SM_HP_LR": "0.1", "SM_TRAINING_ENV": json.dumps({"hosts": ["algo-1"], "num_cpus": 2}), "PATH": "/a:/b:/a"}
SCRIPT = Process(["train.py", "--lr", "0.1", "-n", ""], "/opt/ml/code", "/usr/bin/python3", ENVIRON, [])
HOST = HostRun(0, 1.0, "", "", {"output/success": b"", "model/m.bin": b"weights"}, [SCRIPT])


def differences(stock: HostRun, ours: HostRun) -> set[tuple[str, str]]:
    return {(pair.item, pair.kind) for pair in compare({"algo-1": stock}, {"algo-1": ours}) if pair.kind != SAME}


def with_environ(**variables: str) -> HostRun:
    return HOST._replace(scripts=[SCRIPT._replace(environ={**ENVIRON, **variables})])


def test_equal_runs_do_not_differ() -> None:
    assert differences(HOST, HOST) == set()
    assert len(compare({"algo-1": HOST}, {"algo-1": HOST})) == 15


@pytest.mark.parametrize(
    ("ours", "found"),
    [
        (HOST._replace(code=1), {("exit code", DIFFERENT)}),
        (HOST._replace(code=None), {("exit code", DIFFERENT)}),
        (
            HOST._replace(files={"output/success": b""}),
            {("file model/m.bin", MISSING), ("content model/m.bin", MISSING)},
        ),
        (HOST._replace(files={**HOST.files, "model/m.bin": b"other"}), {("content model/m.bin", DIFFERENT)}),
        (HOST._replace(files={**HOST.files, "output/failure": b"why"}), {("file output/failure", ADDITIONAL)}),
        (HOST._replace(scripts=[]), {("script alone", MISSING)}),
        (HOST._replace(scripts=[SCRIPT, SCRIPT]), {("script alone'", ADDITIONAL)}),
        (HOST._replace(scripts=[SCRIPT._replace(cwd="/")]), {("cwd", DIFFERENT)}),
        (
            HOST._replace(scripts=[SCRIPT._replace(argv=["train.py", "-n", "", "--lr", "0.2"])]),
            {("argv order", DIFFERENT), ("argv --lr", DIFFERENT)},
        ),
        (with_environ(SM_HP_LR="0.2"), {("env SM_HP_LR", DIFFERENT)}),
        (with_environ(SM_NEW=""), {("env SM_NEW", ADDITIONAL)}),
        (
            with_environ(SM_TRAINING_ENV=json.dumps({"hosts": ["algo-2"]})),
            {("env SM_TRAINING_ENV.hosts", DIFFERENT), ("env SM_TRAINING_ENV.num_cpus", MISSING)},
        ),
        (with_environ(PATH="/a:/b:/c"), {("env PATH", DIFFERENT)}),
    ],
)
def test_each_difference_is_found_by_itself(ours: HostRun, found: set[tuple[str, str]]) -> None:
    assert differences(HOST, ours) == found


def test_what_is_anew_each_time_and_what_means_the_same_is_no_difference() -> None:
    anew = {"OMPI_MCA_ess_base_jobid": "7", "PMIX_ID": "7.0", "RECORD_SECONDS": "3"}
    same = json.dumps({"num_cpus": 2, "hosts": ["algo-1"]})
    assert differences(HOST, with_environ(**anew, PATH="/a:/b", SM_TRAINING_ENV=same)) == set()


def test_mpirun_is_read_by_option() -> None:
    command = (
        "mpirun --host a:2 -np 2 --allow-run-as-root --mca btl ^openib -mca btl self -x PATH -x A=1=2 smddprun ./x -x B"
    )
    assert launch_command([["sh"], ["/opt/venv/bin/mpirun", *command.split()[1:]]]) == {
        "mpirun -host": "a:2",
        "mpirun -np": "2",
        "mpirun -allow-run-as-root": "",
        "mpirun -mca btl": "^openib self",
        "mpirun -x PATH": "(as it is)",
        "mpirun -x A": "1=2",
        "mpirun wrapper": "smddprun",
        "mpirun program": "./x -x B",
    }


@pytest.mark.parametrize(
    "command",
    [
        "/opt/venv/bin/python3 /opt/venv/bin/torchrun --nnodes 2 --nproc_per_node 1 train.py --lr 1",
        "/opt/venv/bin/python3 -m torch.distributed.run --nproc-per-node=1 --nnodes=2 train.py --lr 1",
    ],
)
def test_torchrun_is_read_by_option_in_both_spellings(command: str) -> None:
    assert launch_command([command.split()]) == {
        "torchrun --nnodes": "2",
        "torchrun --nproc_per_node": "1",
        "torchrun wrapper": "",
        "torchrun program": "train.py --lr 1",
    }


def test_a_shell_before_the_rank_is_distinguished_by_its_command() -> None:
    words = ["mpirun", "-np", "1", "/bin/sh", "-c", "cd /; exec $@", "shoal-rank", "python3", "a b.py"]
    assert launch_command([words]) == {
        "mpirun -np": "1",
        "mpirun wrapper": "sh",
        "mpirun program": "python3 'a b.py'",
    }


@pytest.mark.parametrize(
    ("pair", "tree", "covered"),
    [
        (Pair("algo-1", "env SM_A", None, "1"), "mpi-one", True),
        (Pair("algo-1", "env SM_A", None, "2"), "mpi-one", False),
        (Pair("algo-1", "env SM_A", None, "1"), "other", False),
        (Pair("algo-1", "env SM_A", "1", None), "mpi-one", False),
        (Pair("algo-1", "env A", None, "1"), "mpi-one", False),
    ],
)
def test_an_entry_covers_what_it_says(pair: Pair, tree: str, covered: bool) -> None:
    entry = Divergence("env SM_*", ADDITIONAL, "for a test", "plain mpi-*", ours="1")
    assert entry.covers(tree, pair) == covered


def test_every_entry_gives_a_reason_and_no_entry_covers_everything() -> None:
    for entry in DIVERGENCES:
        assert entry.reason.endswith("."), entry
        assert entry.item.split()[0] not in ("*", "env*"), entry


def test_the_document_holds_the_table() -> None:
    """Written by `python -m tests.conformance.divergences`."""
    document = DOCUMENT.read_text()
    assert with_table(document) == document
    assert DIVERGENCES[0].reason in document
