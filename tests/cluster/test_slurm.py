"""Jobs of examples/slurm on a real Slurm cluster of two nodes, in this virtual environment."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import SECONDS, Work
from .slurm import NODES, ROOT, Cluster

EXAMPLE = ROOT / "examples" / "slurm"
pytestmark = pytest.mark.xdist_group("slurm")

# Waits for SIGTERM, and saves then.
CAREFUL = """
import os, signal, sys, time
from pathlib import Path

def save(number, frame):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(3)
    name = "last-" + os.environ["LOCAL_RANK"]
    Path(os.environ["SM_MODEL_DIR"]).parent.joinpath("checkpoints", name).write_text("step 7")
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
forked = b"sidecars.standby" in Path("/proc/self/cmdline").read_bytes()
print("up", os.environ["SM_CURRENT_HOST"], "forked" if forked else "fresh", flush=True)
while True:
    signal.pause()
"""


@pytest.mark.long
def test_the_example_trains_the_digits_on_two_nodes_with_two_ranks_each(cluster: Cluster, work: Work) -> None:
    values = json.loads((ROOT / "examples" / "slurm" / "hyperparameters.json").read_text())
    hyperparameters = work.directory / "hyperparameters.json"
    hyperparameters.write_text(json.dumps({**values, "epochs": "5"}))
    channel = work.directory / "digits"
    prepare = [sys.executable, str(ROOT / "examples" / "digits" / "prepare.py"), str(channel)]
    subprocess.run(prepare, check=True, stdout=subprocess.DEVNULL)
    number = work.submit_example(
        CODE=str(ROOT / "examples" / "digits"), CHANNEL=str(channel), HYPERPARAMETERS=str(hyperparameters)
    )
    job = cluster.wait(number, SECONDS)
    assert (job.state, job.exit_code) == ("COMPLETED", "0:0"), job.log
    first, second = (work.outcome(number, node) for node in NODES)
    assert (first[0], second[0]) == ("", ""), job.log
    assert first[1]["hosts"] == second[1]["hosts"] == list(NODES)
    assert (first[1]["ranks"], first[1]["launcher"]) == (4, "mpi")
    metrics = json.loads((work.base(number, NODES[0]) / "output" / "data" / "metrics.json").read_text())
    assert metrics["world_size"] == 4
    assert metrics["test_accuracy"] > 0.7
    assert (work.base(number, NODES[0]) / "model" / "model.pt").exists()
    assert not work.secret(number).exists()


@pytest.mark.parametrize(
    ("launcher", "ranks", "start"),
    [("mpi", 1, "fresh"), ("mpi", 2, "forked"), ("torch_distributed", 2, "forked")],
)
def test_scancel_reaches_the_script_which_saves_a_checkpoint(
    cluster: Cluster, work: Work, launcher: str, ranks: int, start: str
) -> None:
    chosen = {f"sagemaker_{launcher}_enabled": "true", "sagemaker_mpi_num_of_processes_per_host": str(ranks)}
    number = work.submit(CAREFUL, **chosen)
    cluster.until(number, lambda job: len(re.findall(rf"up node-\d {start}", job.log)) == 2 * ranks, SECONDS)
    assert work.secret(number).stat().st_mode & 0o777 == 0o600
    assert work.secret(number).read_text().strip() not in command_lines()
    cluster.ask("scancel", number)
    job = cluster.wait(number, SECONDS)
    assert job.state == "CANCELLED", job.log
    for node in NODES:
        message, report = work.outcome(number, node)
        assert "SIGTERM" in message
        assert report["exit_code"] == 143
        saved = sorted((work.base(number, node) / "checkpoints").iterdir())
        assert [path.name for path in saved] == [f"last-{rank}" for rank in range(ranks)]
        assert {path.read_text() for path in saved} == {"step 7"}
        assert (work.base(number, node) / "input" / "data" / "training").samefile(work.directory / "channel")
    assert not work.secret(number).exists()


def command_lines() -> str:
    """Returns the command lines of all processes of this machine, also of the nodes."""
    texts = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            texts.append(path.read_text(errors="replace"))
        except OSError:
            continue  # it has ended
    assert any("slurmd" in text for text in texts)
    return "\n".join(texts)


def test_srun_starts_train_without_a_batch_script(cluster: Cluster, work: Work) -> None:
    """In its name for each node, train finds the hosts, and says from where; several tasks of a node are an error."""
    (work.directory / "code").mkdir()
    (work.directory / "code" / "train.py").write_text("import os; print('rank', os.environ['SM_CURRENT_HOST'])")
    start = f"SAGEMAKER_BASE_DIR=$PWD/$SLURMD_NODENAME exec {train()}"
    code = {"SAGEMAKER_SUBMIT_DIRECTORY": str(work.directory / "code"), "SAGEMAKER_PROGRAM": "train.py"}
    variables = {**code, "SHOAL_JOB_SECRET": os.urandom(16).hex()}
    done = cluster.run("srun", "--nodes=2", "sh", "-c", start, cwd=work.directory, variables=variables)
    assert done.returncode == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if "rank" in line) == ["rank node-1", "rank node-2"]

    explained = cluster.run("srun", "--nodes=2", train(), "--explain", cwd=work.directory, variables=variables)
    assert explained.stdout.count("hosts from   Slurm: SLURM_STEP_NODELIST=node-[1-2]") == 2, explained
    twice = cluster.run("srun", "--nodes=2", "--ntasks=4", train(), cwd=work.directory, variables=variables)
    assert twice.returncode != 0
    assert "srun started 4 tasks on 2 nodes" in twice.stderr


def train() -> str:
    return str(Path(sys.executable).with_name("train"))


@pytest.mark.long
def test_a_node_that_is_lost_fails_the_job_on_the_other_node(cluster: Cluster, work: Work) -> None:
    """Slurm takes the node for lost, at last, and ends the job. `train` has written its result long before."""
    number = work.submit("import time\nprint('up', flush=True)\ntime.sleep(600)")
    cluster.until(number, lambda job: job.log.count("up") == 2, SECONDS)
    cluster.lose_node("node-2")
    failure = work.base(number, "node-1") / "output" / "failure"
    job = cluster.until(number, lambda _: failure.exists(), SECONDS)
    assert job.state == "RUNNING"  # Slurm does not know yet
    cluster.ask("scontrol", "update", "nodename=node-2", "state=down", "reason=lost")  # not a minute later
    job = cluster.wait(number, SECONDS)
    cluster.start_node("node-2")
    message, report = work.outcome(number, "node-1")
    assert "node-2" in message, message
    assert report["exit_code"] not in (0, None)
    assert job.state in ("NODE_FAIL", "FAILED"), job
    assert not (work.base(number, "node-2") / "output" / "success").exists()
    cluster.run("scontrol", "update", "nodename=node-2", "state=resume")  # an error if the node is idle already
    cluster.await_idle()


@pytest.mark.parametrize(
    ("variable", "fix"),
    [
        ("CODE", "CODE=DIR"),
        ("CHANNEL", "prepare.py .cache/digits"),
        ("HYPERPARAMETERS", "HYPERPARAMETERS=FILE"),
        ("IMAGE", "unpack.sh TAG DIR"),
    ],
)
def test_a_path_that_does_not_exist_is_an_error_with_a_fix(variable: str, fix: str, tmp_path: Path) -> None:
    (tmp_path / "hp.json").write_text("{}")
    values = {"CODE": ".", "CHANNEL": ".", "HYPERPARAMETERS": "hp.json", variable: "pytorch-training:1"}
    environ = {"PATH": os.environ["PATH"], "SLURM_SUBMIT_DIR": str(tmp_path), **values}
    done = subprocess.run(["bash", EXAMPLE / "train.sbatch"], env=environ, cwd="/", capture_output=True, text=True)
    assert done.returncode == 2
    assert f"train.sbatch: {variable}: {tmp_path}/pytorch-training:1 is not " in done.stderr
    assert fix in done.stderr.partition("Fix: ")[2]
    assert not (tmp_path / "jobs").exists()


@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["pytorch"], 2), (["--help"], 0)])
def test_unpack_explains_its_arguments(arguments: list[str], code: int) -> None:
    done = subprocess.run([EXAMPLE / "unpack.sh", *arguments], capture_output=True, text=True)
    assert (done.returncode, done.stderr.partition(" (")[0]) == (code, "usage: unpack.sh IMAGE DIRECTORY")
