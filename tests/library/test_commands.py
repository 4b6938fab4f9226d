"""The commands that SageMaker's toolkit puts before a rank's: a rank does not notice them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.launching import clean_environment

import smddpcommon

TELL = "import json, os, sys; print(json.dumps([os.getpid(), sys.argv[1:], os.environ['MARK']])); sys.exit(7)"
MODEL_PARALLEL = ["-i", "ml.p4d.24xlarge", "--allow-bypass"]


def start(name: str, *words: str) -> subprocess.Popen[str]:
    program = Path(sys.executable).with_name(name)
    pipe = subprocess.PIPE
    return subprocess.Popen([program, *words], env={**os.environ, "MARK": "x"}, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("smddprun", []),
        ("smddprun", ["-n", "2", "-x", "PATH", "-x", "HOME"]),
        ("smddpmprun", []),
        ("smddpmprun", MODEL_PARALLEL),
    ],
    ids=str,
)
def test_the_command_takes_their_place(name: str, options: list[str]) -> None:
    process = start(name, *options, sys.executable, "-c", TELL, "-i", "a b", "--allow-bypass", "")
    output, _ = process.communicate(timeout=60)
    assert json.loads(output) == [process.pid, ["-i", "a b", "--allow-bypass", ""], "x"]
    assert process.returncode == 7


@pytest.mark.parametrize("name", ["smddprun", "smddpsinglenode", "smddpmprun"])
def test_a_rank_rehearses_where_it_is_asked_to(name: str) -> None:
    """By the function: the commands of an older installation know nothing of it."""
    start = f"import sys; from smdistributed.core.commands import {name}; sys.argv[0] = {name!r}; {name}()"
    tell = "import os; print(os.environ.get('SHOAL_REHEARSE'))"
    for options, printed in ((["--rehearse"], "1"), ([], "None")):
        command = [sys.executable, "-c", start, *options, sys.executable, "-c", tell]
        environ = {key: value for key, value in os.environ.items() if key != "SHOAL_REHEARSE"}
        assert subprocess.run(command, capture_output=True, text=True, env=environ, check=True).stdout == f"{printed}\n"


def by_function(name: str, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run one of the commands in an environment of no launcher but what is given."""
    program = Path(sys.executable).with_name(name)
    start = f"import sys; from smdistributed.core.commands import {name}; sys.argv[0] = {str(program)!r}; {name}()"
    env = {**clean_environment(), **environ}
    return subprocess.run([sys.executable, "-c", start, *words], capture_output=True, text=True, env=env, timeout=60)


LOCAL_RANK = ["sh", "-c", "echo $SMDATAPARALLEL_LOCAL_RANK $MINE"]
MPI_RANK = {f"OMPI_COMM_WORLD_{name}": "2" for name in ("SIZE", "LOCAL_SIZE")}
MPI_RANK |= {f"OMPI_COMM_WORLD_{name}": "1" for name in ("RANK", "LOCAL_RANK")}


@pytest.mark.parametrize("name", ["smddprun", "smddpsinglenode", "smddp_singlenode_dev"])
def test_a_data_parallel_rank_finds_its_local_rank(name: str) -> None:
    """AWS documents the variable; transformers reads it."""
    assert by_function(name, *LOCAL_RANK, **MPI_RANK, SM_NUM_GPUS="2").stdout == "1\n"


@pytest.mark.parametrize("name", ["smddpsinglenode", "smddp_singlenode_dev"])
def test_a_rank_for_each_gpu_is_started_where_no_launcher_has(name: str) -> None:
    """As in the published smdataparallel_mnist_script_mode.sh, which is started once."""
    plain = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    done = by_function(name, "-x", "MINE=x", *LOCAL_RANK, **plain, SM_NUM_GPUS="3")
    assert sorted(done.stdout.splitlines()) == ["0 x", "1 x", "2 x"], done.stderr
    assert by_function(name, *LOCAL_RANK).stdout == "\n", "no GPU: a job of one"


def test_a_command_is_looked_for_on_path() -> None:
    assert start("smddprun", "true").wait(timeout=60) == 0


@pytest.mark.parametrize(
    ("name", "words", "code", "reason"),
    [
        ("smddprun", [], 2, "the command is missing"),
        ("smddpmprun", MODEL_PARALLEL, 2, "the command is missing"),
        ("smddpmprun", ["-i"], 2, "expected one argument"),
        ("smddprun", ["-i", "ml.p4d.24xlarge", "true"], 2, "unrecognized arguments: -i"),
        ("smddprun", ["no-such-program"], 127, "no-such-program cannot be started: No such file"),
        ("smddprun", ["/"], 126, "/ cannot be started: Permission denied"),
    ],
)
def test_what_cannot_be_run_is_reported(name: str, words: list[str], code: int, reason: str) -> None:
    process = start(name, *words)
    _, error = process.communicate(timeout=60)
    assert process.returncode == code
    assert error.startswith((f"usage: {name}", f"{name}: "))
    assert reason in error


def test_explain_names_the_rank_and_its_engine() -> None:
    environ = {**os.environ, "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    environ.update(MASTER_ADDR="algo-1", MASTER_PORT="7777", SMDDP_ENGINE="gloo")
    output = subprocess.run(
        [Path(sys.executable).with_name("smddprun"), "--explain"], env=environ, capture_output=True, text=True
    ).stdout
    assert "rank 1 of 4, local rank 1 of 2; ranks meet at algo-1:7777" in output
    assert "SMDDP_ENGINE=gloo: gloo everywhere" in output
    assert "MiB for 2 local ranks, pieces of 256 KiB" in output
    assert re.search(
        r"else copied to the host and reduced there; this host has \d+ NVIDIA devices? for 2 local ranks", output
    )


def test_smddpcommon_is_what_published_scripts_call() -> None:
    with pytest.warns(UserWarning, match="setBucketSize has no effect: .* bucket_cap_mb"):
        smddpcommon.setBucketSize(25 << 20)
    for size in (0, 2.5, True):
        with pytest.raises(ValueError, match="must be a whole number of bytes, above 0"):
            smddpcommon.setBucketSize(size)  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match=r"no 'allReduce': .* there is setBucketSize only"):
        _ = smddpcommon.allReduce
