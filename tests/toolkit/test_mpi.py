"""MPI on one host, with the real mpirun."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from . import openmpi
from .conftest import TRAIN, Run, Tree, alive, clean_environment

pytestmark = pytest.mark.mpi

BIN = str(Path(sys.executable).parent)

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "SM_CURRENT_HOST")
DATA_PARALLEL = "SMDATAPARALLEL_LOCAL_RANK"

HARMLESS = {
    0: "-verbose --allow-run-as-root --display-map --display-allocation --display-devel-map --report-bindings "
    "--tag-output --timestamp-output --merge-stderr-to-stdout --output-filename out --xml --show-progress "
    "--debug-daemons --report-state-on-timeout --get-stack-traces --timeout 60 --stdin none --rank-by slot "
    "--use-hwthread-cpus --nooversubscribe --disable-recovery --leave-session-attached --noprefix --prefix /usr "
    "--path /usr/bin --report-child-jobs-separately -x NOSUCH",
    4: "-q --display-topo --display-diffable-map --display-devel-allocation --novm --do-not-resolve --use-regexp "
    "--fwd-mpirun-port --enable-instant-on-support --index-argv-by-rank --xml-file out --tune /dev/null -am /dev/null",
    5: "--display map --display-topo x --output tag --output-directory out --stream-buffering 0 --tmpdir /tmp "
    "--parseable --no-aggregate-help --hetero-nodes --forward-signals none --gpu-support false --pset a "
    "--pmixmca gds hash --display-comm --no-app-prefix --spawn-timeout 60 --memory-alloc-kinds mpi "
    "--initial-errhandler mpi_errors_abort",
}


def ranks(tree: Tree, count: int = 2, **more: object) -> None:
    tree.hyperparameters(sagemaker_mpi_enabled=True, sagemaker_mpi_num_of_processes_per_host=count, **more)


def lines(out: str) -> list[tuple[str, str]]:
    """(mark, text) of each line, sorted."""
    return sorted((mark, text) for mark, _, text in (line.partition("] ") for line in out.splitlines()))


def test_every_rank_knows_itself(tree: Tree, run: Run) -> None:
    tree.script(f"import os, json; print(json.dumps([os.environ.get(n) for n in {VARIABLES!r}]))")
    tree.hosts("algo-1", "algo-1")
    ranks(tree)
    done = run(SAGEMAKER_PROGRAM="train.py")
    assert done.code == 0, done.err
    found = {mark: json.loads(text) for mark, text in lines(done.out)}
    assert found == {
        "[0,algo-1": ["0", "0", "2", "2", "127.0.0.1", "algo-1"],
        "[1,algo-1": ["1", "1", "2", "2", "127.0.0.1", "algo-1"],
    }
    report = tree.report
    assert (report["launcher"], report["ranks"], report["exit_code"]) == ("mpi", 2, 0)
    assert report["launch_seconds"] > 0


@pytest.mark.parametrize(
    ("asked", "local_rank"),
    [
        ({"sagemaker_distributed_dataparallel_enabled": True}, ["0", "0"]),
        ({"sagemaker_mpi_enabled": True, "mp_parameters": {"partitions": 1}}, [None, None]),
    ],
)
def test_a_rank_of_the_library_finds_what_aws_documents(
    tree: Tree, run: Run, asked: dict[str, object], local_rank: list[object]
) -> None:
    """The stages of a model have no LOCAL_RANK, not even the container's own."""
    tree.script(f"import os; print([os.environ.get(n) for n in ('LOCAL_RANK', {DATA_PARALLEL!r})])")
    tree.hyperparameters(**asked)
    done = run(SAGEMAKER_PROGRAM="train.py", LOCAL_RANK="3")
    assert done.out == f"{local_rank}\n", done.err


def test_ranks_meet(tree: Tree, run: Run) -> None:
    tree.script("from mpi4py import MPI; print(MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.rank + 1))")
    ranks(tree, 3)
    done = run(SAGEMAKER_PROGRAM="train.py")
    assert done.code == 0, done.err
    assert [text for _, text in lines(done.out)] == ["6", "6", "6"]


def test_one_host_needs_no_ssh(tree: Tree, run: Run) -> None:
    tree.script("print('ran')")
    ranks(tree)
    assert shutil.which("ssh", path=BIN) is None
    done = run(SAGEMAKER_PROGRAM="train.py", PATH=BIN)
    assert done.code == 0, done.err


def test_one_rank_has_no_mark(tree: Tree, run: Run) -> None:
    tree.script("import sys; print('  out'); print('  err', file=sys.stderr)")
    ranks(tree, 1)
    done = run(SAGEMAKER_PROGRAM="train.py")
    assert done.out == "  out\n"
    assert "\n  err\n" in done.err


def test_long_lines_and_odd_bytes_stay_whole(tree: Tree, run: Run) -> None:
    """mpirun's own tags cut lines at 4 KB, and mix the lines of the ranks."""
    tree.script("import os\nfor n in range(20):\n    os.write(1, (os.environ['RANK'] * 20000 + '  é\\n').encode())")
    ranks(tree)
    done = run(SAGEMAKER_PROGRAM="train.py")
    texts = [text for _, text in lines(done.out)]
    assert texts == ["0" * 20000 + "  é"] * 20 + ["1" * 20000 + "  é"] * 20


def test_stdout_and_stderr_stay_apart(tree: Tree, run: Run) -> None:
    tree.script("import sys; print('out'); print('err', file=sys.stderr)")
    ranks(tree)
    done = run(SAGEMAKER_PROGRAM="train.py")
    assert [text for _, text in lines(done.out)] == ["out", "out"]
    assert done.err.count("] err\n") == 2


@pytest.mark.parametrize("meet", ["", "from mpi4py import MPI\n"])
def test_the_failing_ranks_code_is_the_jobs(tree: Tree, run: Run, meet: str) -> None:
    tree.script(f"{meet}import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(42)\ntime.sleep(60)")
    ranks(tree)
    assert run(SAGEMAKER_PROGRAM="train.py").code == 42
    assert "rank 1 on " in tree.failure
    assert "exited with code 42" in tree.failure
    assert tree.outcome() == {"failure"}


def test_the_failing_ranks_exception_comes_first(tree: Tree, run: Run) -> None:
    tree.script("from mpi4py import MPI\nif MPI.COMM_WORLD.rank: raise ValueError('boom')\nMPI.COMM_WORLD.Barrier()")
    ranks(tree)
    assert run(SAGEMAKER_PROGRAM="train.py").code == 1
    first, second = tree.failure.splitlines()[:2]
    assert first == "ValueError: boom"
    assert second.startswith("rank 1 on ")


def test_a_rank_killed_by_a_signal(tree: Tree, run: Run) -> None:
    tree.script("import os, time\nif os.environ['RANK'] == '0': os.kill(os.getpid(), 11)\ntime.sleep(60)")
    ranks(tree)
    assert run(SAGEMAKER_PROGRAM="train.py").code == 139
    assert "rank 0 on " in tree.failure
    assert "was killed by signal 11 (SIGSEGV)" in tree.failure


def test_a_shell_script_in_every_rank(tree: Tree, run: Run) -> None:
    tree.script('echo "$RANK of $WORLD_SIZE: $SM_HP_BATCH_SIZE, ${SHOAL_RUN_DIR-none}"', "go.sh")
    ranks(tree, **{"batch-size": 4})
    done = run(SAGEMAKER_PROGRAM="go.sh")
    assert [text for _, text in lines(done.out)] == ["0 of 2: 4, none", "1 of 2: 4, none"]


def test_arguments_with_every_character(tree: Tree, run: Run) -> None:
    tree.script("import json, sys; print(json.dumps(sys.argv[1:]))")
    value = "a b'c\"d$HOME`e`\\f;g|h*\té"
    ranks(tree, text=value)
    done = run("last one", SAGEMAKER_PROGRAM="train.py")
    assert [json.loads(text) for _, text in lines(done.out)] == [["--text", value, "last one"]] * 2


@pytest.mark.parametrize("options", ["-hostfile hosts", "--help", "-np 7"])
def test_options_that_would_skip_the_training(tree: Tree, run: Run, options: str) -> None:
    """Defect 4."""
    tree.script("print('trained')")
    ranks(tree, sagemaker_mpi_custom_mpi_options=options)
    done = run(SAGEMAKER_PROGRAM="train.py")
    assert (done.code, done.out) == (2, "")
    assert "is not allowed" in tree.failure


def test_custom_options_reach_the_ranks(tree: Tree, run: Run) -> None:
    tree.script("import os; print(os.environ['GREETING'], os.environ['NCCL_DEBUG'])")
    options = "--mca btl_vader_single_copy_mechanism none -x 'GREETING=hello there' --NCCL_DEBUG WARN"
    ranks(tree, sagemaker_mpi_custom_mpi_options=options)
    done = run(SAGEMAKER_PROGRAM="train.py")
    assert [text for _, text in lines(done.out)] == ["hello there WARN"] * 2, done.err


@pytest.mark.parametrize(
    ("variables", "options", "of_mpirun", "of_ranks"),
    [({}, "", "nOnE", None), ({"UCX_MEM_EVENTS": "y"}, "", None, None), ({}, "-x {}=reloc", "nOnE", "reloc")],
    ids=["default", "by-a-variable", "by-an-option"],
)
def test_only_ranks_wait_for_the_memory_hooks_of_ucx(
    tree: Tree, run: Run, variables: dict[str, str], options: str, of_mpirun: str | None, of_ranks: str | None
) -> None:
    name = "UCX_MEM_MMAP_HOOK_MODE"
    tree.script(
        "import os, pathlib\n"
        "status = pathlib.Path(f'/proc/{os.getppid()}/status').read_text()\n"
        "mpirun = pathlib.Path('/proc', status.split('PPid:')[1].split()[0], 'environ').read_text()\n"
        "env = dict(each.split('=', 1) for each in mpirun.split('\\0') if each)\n"
        f"print(env.get({name!r}), os.environ.get({name!r}))"
    )
    ranks(tree, 1, sagemaker_mpi_custom_mpi_options=options.format(name))
    done = run(SAGEMAKER_PROGRAM="train.py", **variables)
    assert done.out == f"{of_mpirun} {of_ranks}\n", done.err


def test_a_secret_among_the_options_is_not_shown(tree: Tree, run: Run) -> None:
    tree.script(
        "import os\nfrom mpi4py import MPI\n"
        "print(len(os.environ['WANDB_API_KEY']), len(os.environ['MY_TOKEN']))\n"
        "MPI.COMM_WORLD.barrier()\nraise SystemExit(3)\n"  # the first that fails ends the other
    )
    options = "-x WANDB_API_KEY=hunter2 -x 'MY_TOKEN=swordfish and more'"
    ranks(tree, sagemaker_mpi_custom_mpi_options=options)
    shown = [run(*words, SAGEMAKER_PROGRAM="train.py") for words in (["--explain"], ["--explain", "--json"], [])]
    assert [done.code for done in shown] == [0, 0, 3]
    assert [text for _, text in lines(shown[2].out)] == ["7 18"] * 2
    for done in shown:
        assert not re.search("hunter2|swordfish|and more", done.out + done.err)
    assert "hunter2" not in tree.failure


def test_an_mpirun_that_ends_without_training_is_a_failure(tree: Tree, run: Run) -> None:
    tree.script("print('trained')")
    (tree.base / "mpirun").write_text("#!/bin/sh\nexit 0\n")
    (tree.base / "mpirun").chmod(0o755)
    ranks(tree)
    assert run(SAGEMAKER_PROGRAM="train.py", PATH=f"{tree.base}:{os.environ['PATH']}").code == 1
    assert "mpirun ended with exit code 0, but only 0 of 2 ranks had started" in tree.failure


def test_an_option_that_mpirun_does_not_know(tree: Tree, run: Run) -> None:
    tree.script("print('trained')")
    ranks(tree, sagemaker_mpi_custom_mpi_options="--no-such-option")
    done = run(SAGEMAKER_PROGRAM="train.py")
    assert (done.code, done.out) == (2, "")
    assert "the option '--no-such-option' is not allowed: mpirun does not know it" in tree.failure
    assert tree.outcome() == {"failure"}


def test_the_log_has_only_what_ranks_print_if_a_signal_ends_one(tree: Tree, run: Run) -> None:
    tree.script("import os, time\nprint('began')\nif os.environ['RANK'] == '1': raise SystemExit(3)\ntime.sleep(60)")
    ranks(tree)
    done = run(SAGEMAKER_PROGRAM="train.py")
    assert done.code == 3
    assert {line.rpartition("]")[2].strip() for line in done.out.splitlines()} == {"began"}
    assert "Terminated" not in done.err


def test_the_traceback_is_the_scripts(tree: Tree, run: Run) -> None:
    """Without the frames of mpi4py, which starts it."""
    tree.script("def f():\n    raise ValueError('boom')\nf()\n")
    ranks(tree)
    run(SAGEMAKER_PROGRAM="train.py")
    _, _, end = tree.failure.partition("\n\n")
    assert end.startswith('Traceback (most recent call last):\n  File "train.py", line 3'), tree.failure


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("--map-by sloot", "The specified mapping policy is not recognized: Policy: sloot"),
        (
            "-x NOSUCH --rankfile /none",
            "Open RTE was unable to open the hostfile: /none Check to make sure the path and filename are correct.",
        ),
    ],
)
def test_the_reason_is_the_first_message_of_mpirun(tree: Tree, run: Run, options: str, why: str) -> None:
    tree.script("print('trained')")
    ranks(tree, sagemaker_mpi_custom_mpi_options=options)
    done = run(SAGEMAKER_PROGRAM="train.py")
    assert done.code != 0
    assert "trained" not in done.out
    first, second = tree.failure.splitlines()[:2]
    assert first == why
    assert second.startswith("mpirun exited with code ")


@pytest.mark.parametrize("series", [4, 5])
def test_options_that_are_harmless_run_a_job(tree: Tree, run: Run, series: int) -> None:
    """Those that fill the log, those that are left out, and those that tune what one host does not use."""
    tree.script("print('trained')")
    ranks(tree, sagemaker_mpi_custom_mpi_options=f"{HARMLESS[0]} {HARMLESS[series]}")
    done = run(SAGEMAKER_PROGRAM="train.py", **(openmpi.variables() if series == 5 else {}))
    assert done.code == 0, done.err
    assert {f"[{rank},{os.uname().nodename}] trained" for rank in (0, 1)} <= set(done.out.splitlines())
    assert "--tag-output is left out" in done.err


def test_sigterm_reaches_every_rank(tree: Tree) -> None:
    tree.script(
        "import os, signal, sys, time\n"
        "def stop(*_):\n    open('saved' + os.environ['RANK'], 'w').close(); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, stop); print('up')\ntime.sleep(60)\n"
    )
    ranks(tree)
    environment = clean_environment(SAGEMAKER_BASE_DIR=str(tree.base), SAGEMAKER_PROGRAM="train.py")
    with subprocess.Popen(
        TRAIN, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as train:
        assert train.stdout
        assert [train.stdout.readline().endswith("] up\n") for _ in range(2)] == [True, True]
        train.send_signal(signal.SIGTERM)
        assert train.wait(20) == 143
    assert (tree.code / "saved0").exists()
    assert (tree.code / "saved1").exists()
    assert "was stopped" in tree.failure


def test_other_users_cannot_enter_a_jobs_temporary_directory(tree: Tree, run: Run) -> None:
    """Its socket starts daemons, and its FIFOs carry what the ranks write."""
    tree.script(
        "import os, stat\nfifo = os.readlink('/proc/self/fd/1')\n"
        "print(*(oct(stat.S_IMODE(os.stat(path).st_mode)) for path in (os.path.dirname(fifo), fifo)))"
    )
    tree.hosts("algo-1", "algo-1")
    ranks(tree)
    done = run(SAGEMAKER_PROGRAM="train.py")
    assert lines(done.out) == [("[0,algo-1", "0o700 0o600"), ("[1,algo-1", "0o700 0o600")], done.err


def test_nothing_is_left_in_the_temporary_directory(tree: Tree, run: Run) -> None:
    tree.script("")
    ranks(tree)
    temporary = tree.base / "tmp"
    temporary.mkdir()
    short = Path(f"/tmp/t{os.getpid()}")  # the path of pytest's directory is too long for a socket
    short.symlink_to(temporary)
    try:
        assert run(SAGEMAKER_PROGRAM="train.py", TMPDIR=str(short)).code == 0
    finally:
        short.unlink()
    assert [path.name for path in temporary.iterdir() if path.name.startswith("shoal")] == []


def test_a_script_may_clean_up_the_temporary_directory(tree: Tree, run: Run) -> None:
    """The job's own files there are lost with it; the result of the script stays."""
    ranks(tree)
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as temporary:
        tree.script(
            "import glob, os, shutil\n"
            f"while os.environ['RANK'] == '1' and (found := glob.glob('{temporary}/shoal-*')):\n"
            "    for path in found:\n        shutil.rmtree(path, ignore_errors=True)  # mpirun may be adding to it\n"
        )
        done = run(SAGEMAKER_PROGRAM="train.py", TMPDIR=temporary)
    assert done.code == 0, done.err
    assert tree.outcome() == {"success"}


def test_what_a_rank_leaves_behind_is_ended(tree: Tree, run: Run) -> None:
    tree.script("import subprocess; print(subprocess.Popen(['sleep', '60']).pid)")
    ranks(tree)
    done = run(SAGEMAKER_PROGRAM="train.py")
    assert done.code == 0, done.err
    deadline = time.monotonic() + 30
    for _, pid in lines(done.out):
        while alive(int(pid)):
            assert time.monotonic() < deadline, f"{pid} still runs"
            time.sleep(0.01)


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_a_standard_descriptor_may_be_closed(tree: Tree, closed: str) -> None:
    tree.script("print('out')")
    ranks(tree)
    environment = clean_environment(SAGEMAKER_BASE_DIR=str(tree.base), SAGEMAKER_PROGRAM="train.py")
    subprocess.run(["/bin/sh", "-c", f'exec "$@" {closed}', "sh", *TRAIN], env=environment, check=True, timeout=30)
    assert tree.outcome() == {"success"}
