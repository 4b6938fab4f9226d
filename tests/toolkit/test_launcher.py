"""Which launcher runs a job, over which hosts, and with which command and variables; then torchrun for real."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal_toolkit.errors import ContractError
from shoal_toolkit.plan.plan import LaunchPlan
from shoal_toolkit.plan.rank_shell import STOPPING, wrap_for_mpirun

from .conftest import TRAIN, Run, Tree, clean_environment
from .netns import UNAVAILABLE, Host, running, two_hosts
from .test_plan import MACHINE, planned

GROUPS = [
    {"instance_group_name": "data", "instance_type": "ml.c5.xlarge", "hosts": ["algo-1"]},
    {"instance_group_name": "gpu", "instance_type": "ml.p3.2xlarge", "hosts": ["algo-2", "algo-3"]},
]
MPI, DDP = "sagemaker_mpi_enabled", "sagemaker_pytorch_ddp_enabled"
TORCHRUN, SMDDP = "sagemaker_torch_distributed_enabled", "sagemaker_distributed_dataparallel_enabled"
MWMS, PS = "sagemaker_multi_worker_mirrored_strategy_enabled", "sagemaker_parameter_server_enabled"


@pytest.mark.parametrize(
    ("asked", "launcher"),
    [
        ([], "process"),
        ([MPI], "mpi"),
        ([DDP], "pytorchddp"),
        ([TORCHRUN], "torch_distributed"),
        ([SMDDP], "smdataparallel"),
        ([MWMS], "multi_worker_mirrored_strategy"),
        ([PS], "parameter_server"),
        ([MPI, SMDDP, TORCHRUN, DDP], "mpi"),
        ([SMDDP, TORCHRUN, DDP], "pytorchddp"),
        ([SMDDP, TORCHRUN], "torch_distributed"),
        ([SMDDP, MWMS, PS], "smdataparallel"),
        ([MWMS, PS], "multi_worker_mirrored_strategy"),
    ],
)
def test_the_order_of_precedence(tree: Tree, asked: list[str], launcher: str) -> None:
    tree.hyperparameters(**dict.fromkeys(asked, True))
    made = planned(tree)
    assert made.launcher.name == launcher
    for key in asked[1:]:
        assert sum("is true too, and is ignored" in note for note in made.notes) == len(asked) - 1, key


def test_a_launcher_for_other_hardware_is_refused(tree: Tree) -> None:
    tree.hyperparameters(sagemaker_pytorch_xla_multi_worker_enabled=True)
    with pytest.raises(ContractError, match=r"pytorchxla.* not supported\. Fix: enable one of sagemaker_mpi_enabled"):
        planned(tree)


# TensorFlow


def tf_config(made: LaunchPlan) -> Any:
    return json.loads(made.env["TF_CONFIG"])


@pytest.mark.parametrize(("host", "index"), [("a", 0), ("b", 1)])
def test_multi_worker_mirrored(tree: Tree, host: str, index: int) -> None:
    tree.hosts(host, "a", "b")
    tree.hyperparameters(**{MWMS: True})
    made = planned(tree)
    assert made.sidecars == ()
    assert tf_config(made) == {
        "cluster": {"worker": ["a:8890", "b:8890"]},
        "environment": "cloud",
        "task": {"index": index, "type": "worker"},
    }


@pytest.mark.parametrize(("host", "task", "index"), [("a", "master", 0), ("b", "worker", 0), ("c", "worker", 1)])
def test_parameter_server(tree: Tree, host: str, task: str, index: int) -> None:
    tree.hosts(host, "a", "b", "c")
    tree.hyperparameters(**{PS: True})
    made = planned(tree)
    cluster = {"master": ["a:2222"], "worker": ["b:2222", "c:2222"], "ps": ["a:2223", "b:2223", "c:2223"]}
    assert tf_config(made) == {"cluster": cluster, "environment": "cloud", "task": {"index": index, "type": task}}
    (server,) = made.sidecars
    config = json.loads(server.env["TF_CONFIG"])
    assert config["task"] == {"index": ["a", "b", "c"].index(host), "type": "ps"}
    assert not server.drains


def test_one_host_needs_no_parameter_server(tree: Tree) -> None:
    tree.hyperparameters(**{PS: True})
    made = planned(tree)
    assert made.sidecars == ()
    assert "TF_CONFIG" not in made.env


# Instance groups


@pytest.mark.parametrize("host", ["algo-1", "algo-2", "algo-3"])
def test_groups_outside_the_distribution_run_the_script_on_their_own(tree: Tree, host: str) -> None:
    """Defect 21: in the stock toolkit they do so without a word, and nobody hears of their end."""
    tree.hosts(host, "algo-1", "algo-2", "algo-3", instance_groups=GROUPS, current_group_name="any")
    tree.hyperparameters(**{MPI: True, "sagemaker_distribution_instance_groups": ["gpu"]})
    made = planned(tree)
    assert made.hosts == ("algo-2", "algo-3", "algo-1")
    assert made.ranks == {"algo-2": 1, "algo-3": 1}
    assert made.outside == ("algo-1",)
    assert any("outside the distribution" in note and "algo-1" in note for note in made.notes)
    assert made.env["MASTER_ADDR"] == "algo-2"
    if host == "algo-1":
        assert made.command == ("/usr/bin/python3", "train.py")
        assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & {*made.env}
        assert not made.has_ranks
    elif host == "algo-2":
        assert made.command[:3] == ("/usr/bin/mpirun", "--host", "algo-2:1,algo-3:1")
    else:
        assert made.command == ()


def test_an_unknown_group_is_an_error(tree: Tree) -> None:
    tree.hosts("algo-1", "algo-1", "algo-2", "algo-3", instance_groups=GROUPS)
    tree.hyperparameters(**{MPI: True, "sagemaker_distribution_instance_groups": ["gpus"]})
    with pytest.raises(ContractError, match=r"names 'gpus'.*Did you mean 'gpu'\?"):
        planned(tree)


# The shell of a rank


@pytest.mark.parametrize(("stopping", "code", "out"), [(False, 0, b"runs\n"), (True, 143, b"")])
def test_a_signal_before_the_script_runs_ends_the_rank(tmp_path: Path, stopping: bool, code: int, out: bytes) -> None:
    """The shell traps signals. It must not drop one that came when it had reported its start, and no script ran."""
    if stopping:
        train = subprocess.Popen(["true"])
        train.wait()
        (tmp_path / STOPPING).write_text(f"{train.pid} {signal.SIGTERM.value}\n")
    directories = dict.fromkeys(("SHOAL_RUN_DIR", "SHOAL_CODE_DIR"), str(tmp_path))
    environment = {**os.environ, **directories, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    done = subprocess.run(wrap_for_mpirun(["echo", "runs"]), env=environment, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (code, out, b"")


# torchrun


def test_the_command_of_torchrun(tree: Tree) -> None:
    tree.hosts("b", "a", "b")
    tree.hyperparameters(**{TORCHRUN: True}, lr=0.1)
    command = planned(tree, machine=MACHINE._replace(gpus=8), SHOAL_STANDBY="0").command
    assert command[:3] == ("/usr/bin/python3", "-m", "torch.distributed.run")
    options = dict(zip(command[3:15:2], command[4:15:2], strict=True))
    assert options == {
        "--nnodes": "2",
        "--nproc_per_node": "8",
        "--master_addr": "a",
        "--master_port": "7777",
        "--node_rank": "1",
        "--monitor_interval": "0.1",
    }
    assert command[-4:] == ("/usr/bin/python3", "train.py", "--lr", "0.1")


@pytest.mark.parametrize(
    ("given", "added", "missing"),
    [
        ("", "--multi_gpu --mixed_precision no", "--use_fsdp"),
        ("--mixed-precision=bf16", "--mixed-precision=bf16 --multi_gpu", "--mixed_precision"),
        ("--use_fsdp --config_file 'a b.yaml'", "--use_fsdp", "--multi_gpu --mixed_precision"),
        ("--use_deepspeed", "--deepspeed_multinode_launcher standard", "--multi_gpu"),
    ],
)
def test_options_of_accelerate_reach_it(tree: Tree, given: str, added: str, missing: str) -> None:
    """Defaults and the kind of the launch give way to them."""
    tree.hosts("a", "a", "b")
    tree.hyperparameters(sagemaker_accelerate_enabled=True, sagemaker_accelerate_options=given)
    command = planned(tree, machine=MACHINE._replace(gpus=2)).command
    assert {*shlex.split(given), *added.split()} <= {*command}
    assert not {*missing.split()} & {*command}


def test_an_open_quote_in_the_options_of_accelerate_is_refused(tree: Tree) -> None:
    tree.hyperparameters(sagemaker_accelerate_enabled=True, sagemaker_accelerate_options="--config_file 'a")
    with pytest.raises(ContractError, match=r"sagemaker_accelerate_options .* Fix: close the quote"):
        planned(tree)


def test_ranks_of_deepspeed_get_their_number_as_the_first_argument(tree: Tree, run: Run) -> None:
    tree.script(
        "import os, sys\nprint('argv', sys.argv[1:] == ['--local_rank=' + os.environ['LOCAL_RANK'], '-a', '$'])\n"
    )
    tree.hyperparameters(
        sagemaker_deepspeed_enabled=True, sagemaker_program="train.py", sagemaker_mpi_num_of_processes_per_host=2, a="$"
    )
    assert run().out.count("argv True") == 2


def torchrun(tree: Tree, script: str, ranks: int = 2) -> None:
    tree.script(script)
    tree.hyperparameters(
        **{TORCHRUN: True, "sagemaker_program": "train.py", "sagemaker_mpi_num_of_processes_per_host": ranks}
    )


SUM = (
    "import os, torch, torch.distributed as dist\n"
    "dist.init_process_group('gloo')\n"
    "x = torch.tensor([float(dist.get_rank() + 1)])\n"
    "dist.all_reduce(x)\n"
    "print(f'sum {x.item():.0f} of {dist.get_world_size()} on', os.environ['SM_CURRENT_HOST'])\n"
    "assert os.environ['SMDATAPARALLEL_LOCAL_RANK'] == os.environ['LOCAL_RANK']\n"
    "dist.destroy_process_group()\n"
)


def test_ranks_under_torchrun_start(tree: Tree, run: Run) -> None:
    """Without torch in the script, which takes seconds to import; on two hosts, below, ranks add with it."""
    torchrun(tree, "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])")
    done = run()
    assert done.code == 0, done.err
    assert sorted(re.findall(r"^\[(\d),[^]]+\] rank \1 of 2", done.out, re.MULTILINE)) == ["0", "1"]
    assert "OMP_NUM_THREADS" not in done.err, "torchrun logs that it sets 1, unless it is set"
    assert tree.outcome() == {"success"}
    assert tree.report["launcher"] == "torch_distributed"


def test_a_rank_that_fails_under_torchrun_ends_the_job_with_its_own_code(tree: Tree, run: Run) -> None:
    """Defect 3: in the stock toolkit a failure of torchrun can end with exit code 0 and a success file."""
    torchrun(
        tree,
        "import os, sys, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    print('RuntimeError: no luck', file=sys.stderr); sys.exit(37)\n"
        "time.sleep(300)\n",
    )
    done = run()  # which waits for at most 60 s
    assert done.code == 37
    assert tree.failure.startswith("RuntimeError: no luck\nrank 1 on ")
    assert tree.outcome() == {"failure"}


def test_a_rank_that_leaves_at_once_does_not_end_one_that_saves(tree: Tree, tmp_path: Path) -> None:
    """Only rank 0 has a handler: mpirun would kill it in the middle, as another rank was ended by the signal."""
    tree.script(
        "import os, signal, sys, time\n"
        "def save(*_):\n"
        "    time.sleep(2)\n"
        "    open(os.environ['SM_MODEL_DIR'] + '/saved', 'w').close()\n"
        "    sys.exit(0)\n"
        "if os.environ['RANK'] == '0':\n"
        "    signal.signal(signal.SIGTERM, save)\n"
        "print('up', flush=True)\n"
        "time.sleep(60)\n"
    )
    tree.hyperparameters(**{MPI: True, "sagemaker_program": "train.py", "sagemaker_mpi_num_of_processes_per_host": 2})
    assert_stopped(tree, tmp_path / "log", ups=2)
    assert (tree.base / "model" / "saved").exists()


def assert_stopped(tree: Tree, log: Path, ups: int) -> None:
    """Send SIGTERM once all ranks are up: the job ends within seconds, and says that it was stopped."""
    with log.open("w") as out:
        job = subprocess.Popen(TRAIN, env=clean_environment(SAGEMAKER_BASE_DIR=str(tree.base)), stdout=out)
        deadline = time.monotonic() + 40
        while log.read_text().count("up") < ups:
            assert time.monotonic() < deadline and job.poll() is None, log.read_text()
            time.sleep(0.02)
        job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=20) == 143
    assert "was stopped" in tree.failure


# On two hosts


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    with two_hosts(tmp_path) as made:
        yield made


def job(hosts: list[Host], **variables: str) -> list[tuple[int, str]]:
    processes = [host.start(**variables) for host in hosts]
    with running(*processes):
        done = [host.finished(process) for host, process in zip(hosts, processes, strict=True)]
    return [(ended.code, ended.out + ended.err) for ended in done]


two = pytest.mark.skipif(bool(UNAVAILABLE), reason=UNAVAILABLE)


@two
def test_torchrun_on_two_hosts(hosts: list[Host]) -> None:
    for host in hosts:
        torchrun(host.tree, SUM, ranks=1)
    ended = job(hosts)
    assert [code for code, _ in ended] == [0, 0], ended
    assert sorted(re.findall(r"\[(\d),(\S+)\] sum 3 of 2 on (\S+)", ended[0][1])) == [
        (str(rank), host.name, host.name) for rank, host in enumerate(hosts)
    ]


@two
@pytest.mark.parametrize("count", [1, 2], ids=["one host", "two hosts"])
def test_accelerate_with_one_rank_per_host(hosts: list[Host], count: int) -> None:
    for host in hosts[:count]:
        host.tree.script(SUM)
        if count == 1:
            host.tree.hosts(host.name, host.name)
        host.tree.hyperparameters(
            sagemaker_program="train.py",
            sagemaker_accelerate_enabled=True,
            sagemaker_mpi_num_of_processes_per_host=1,
        )
    ended = job(hosts[:count])
    assert [code for code, _ in ended] == [0] * count, ended
    assert f"of {count} on {hosts[0].name}" in ended[0][1], ended


@two
def test_a_rank_of_torchrun_that_fails_ends_both_hosts(hosts: list[Host]) -> None:
    """The one on the host that leads nothing: so both torchrun and `train` have to tell the other host."""
    for host in hosts:
        torchrun(
            host.tree,
            "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit('no luck')\ntime.sleep(60)\n",
            ranks=1,
        )
    assert [code for code, _ in job(hosts)] == [1, 1]
    for host in hosts:
        assert host.tree.failure.startswith(f"no luck\nrank 1 on {hosts[1].name} ")


@two
def test_a_group_outside_the_distribution_takes_part_in_the_result(hosts: list[Host]) -> None:
    """The first host of the list is outside: the other one leads, and both have the same end."""
    names = [host.name for host in hosts]
    groups = [{"instance_group_name": f"g{index}", "hosts": [name]} for index, name in enumerate(names)]
    for index, host in enumerate(hosts):
        host.tree.hosts(host.name, *names, instance_groups=groups, current_group_name=f"g{index}")
        host.tree.hyperparameters(**{MPI: True, "sagemaker_distribution_instance_groups": ["g1"]})
        host.tree.script(
            "import os, sys\n"
            "print('in', os.environ['SM_CURRENT_INSTANCE_GROUP'], 'of', os.environ.get('WORLD_SIZE'))\n"
            "if os.environ['SM_CURRENT_INSTANCE_GROUP'] == os.environ.get('FAILS'): sys.exit(9)\n"
        )
    ended = job(hosts)
    assert [code for code, _ in ended] == [0, 0], ended
    assert "in g0 of None" in ended[0][1] and "in g1 of 1" in ended[1][1]
    assert [code for code, _ in job(hosts, FAILS="g0")] == [9, 9]
    assert "outside the distribution" in hosts[1].tree.failure


@two
def test_a_script_starts_nowhere_when_one_host_cannot_start_it(hosts: list[Host]) -> None:
    """Plain processes: the first host waits until every host has reported that it is ready."""
    hosts[0].tree.script("import pathlib, os; pathlib.Path(os.environ['SM_MODEL_DIR'], 'ran').touch()")
    hosts[1].tree.script("", name="other.py")
    for host in hosts:
        host.tree.hyperparameters()
    assert [code for code, _ in job(hosts)] == [2, 2]
    assert not (hosts[0].tree.base / "model" / "ran").exists()


@pytest.mark.parametrize("launcher", [{}, {MPI: True, "sagemaker_mpi_num_of_processes_per_host": 2}])
def test_what_a_shell_script_has_started_may_save(tree: Tree, tmp_path: Path, launcher: dict[str, object]) -> None:
    """The shell dies of the signal at once, the Python below it does not."""
    tree.script("python3 save.py\necho unreachable\n", "go.sh")
    tree.script(
        "import os, signal, sys, time\n"
        "def save(*_):\n"
        "    time.sleep(1.5)\n"
        "    open(os.environ['SM_MODEL_DIR'] + '/' + os.environ.get('RANK', '0'), 'w').close()\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "print('up', flush=True)\n"
        "time.sleep(60)\n",
        "save.py",
    )
    tree.hyperparameters(sagemaker_program="go.sh", **launcher)
    ranks = 2 if launcher else 1
    assert_stopped(tree, tmp_path / "log", ups=ranks)
    assert sorted(path.name for path in (tree.base / "model").iterdir()) == ["0", "1"][:ranks]


def test_a_stop_ends_although_nobody_reads_the_log(tree: Tree) -> None:
    tree.script("import sys\nwhile True: print('x' * 9999, file=sys.stderr)\n")
    environment = clean_environment(SAGEMAKER_BASE_DIR=str(tree.base), SAGEMAKER_PROGRAM="train.py")
    with subprocess.Popen(TRAIN, env=environment, stderr=subprocess.PIPE) as job:
        assert job.stderr is not None
        job.stderr.read(100_000)
        job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=20) == 143
    assert "was stopped" in tree.failure


@pytest.mark.parametrize("handles", [True, False])
@pytest.mark.parametrize("launcher", [{}, {MPI: True}, {TORCHRUN: True}], ids=["plain", "mpi", "torchrun"])
def test_a_signal_for_the_script_does_not_end_the_job(tree: Tree, launcher: dict[str, object], handles: bool) -> None:
    """Slurm's --signal=USR1, submitit and Lightning: the script saves at it, and trains on."""
    handler = "signal.signal(signal.SIGUSR1, lambda *_: (print('saved', flush=True), done.append(1)))\n"
    tree.script(
        "import os, signal, sys, time\ndone = []\n"
        f"{handler if handles else ''}"
        "if os.fork() == 0: time.sleep(60)\n"  # as a worker that loads data
        "print('up', flush=True)\n"
        f"until = time.monotonic() + {20 if handles else 1}\n"
        "while not done and time.monotonic() < until: time.sleep(0.05)\n"
        "print('trained', flush=True)\nos._exit(0)\n"
    )
    ranks = 2 if launcher else 1
    tree.hyperparameters(**launcher, sagemaker_mpi_num_of_processes_per_host=2)
    environment = clean_environment(SAGEMAKER_BASE_DIR=str(tree.base), SAGEMAKER_PROGRAM="train.py")
    with subprocess.Popen(TRAIN, env=environment, stdout=-1, stderr=subprocess.STDOUT, text=True) as job:
        assert job.stdout is not None
        output = ""
        while output.count("up\n") < ranks:
            line = job.stdout.readline()
            assert line, output
            output += line
        job.send_signal(signal.SIGUSR1)
        output += job.stdout.read()
    assert job.returncode == 0, output
    assert output.count("trained") == ranks
    assert output.count("saved") == (ranks if handles else 0)
    note = f"passed on to {ranks} processes" if handles else "has no effect: no process of the script has a handler"
    assert f"SIGUSR1{':' if handles else ''} {note}" in output


@pytest.mark.parametrize("launcher", [{MPI: True}, {TORCHRUN: True}, {}], ids=["mpi", "torchrun", "plain"])
def test_no_launcher_reads_the_arguments_of_the_script(tree: Tree, run: Run, launcher: dict[str, object]) -> None:
    """torchrun's own options begin with these words."""
    tree.script("import sys; sys.stdout.write(f'{sys.argv[1:]}\\n')")
    names = ("monitor", "run", "max", "no", "master", "role", "log", "m", "np", "x")
    tree.hyperparameters(**launcher, **dict.fromkeys(names, "1"), sagemaker_mpi_num_of_processes_per_host=2)
    done = run("--r=16", "--", "--nnodes", "-h", SAGEMAKER_PROGRAM="train.py")
    assert done.code == 0, done.err
    expected = [word for name in sorted(names) for word in ("-" * (1 if len(name) == 1 else 2) + name, "1")]
    line = f"{[*expected, '--r=16', '--', '--nnodes', '-h']}"
    assert done.out.count(line) == (2 if launcher else 1), done.out
