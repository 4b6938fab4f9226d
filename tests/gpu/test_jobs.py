"""Scripts that name a GPU as people do, with each launcher; ranks that share a GPU train as one process."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.toolkit.test_launcher import DDP, MPI, SMDDP, TORCHRUN

from .conftest import GPUS, IS_REAL, Run, Tree

RANKS = Path(__file__).parents[1] / "library/ranks"
EVERYDAY = Path(__file__).parents[1] / "integration/everyday"
by_mpirun_too = pytest.mark.skipif(not IS_REAL, reason="on emulated GPUs, another of mpirun's launchers shows it")
on_a_gpu = pytest.mark.skipif(not IS_REAL, reason="an emulated GPU does not have it")
PLAIN = """\
import os, sys, torch
rank = int(os.environ.get("RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)
before = torch.cuda.is_initialized()
x = torch.ones(2, 2).cuda()
model = torch.nn.Linear(2, 2).to("cuda")
devices = {x.device, torch.zeros(2, device="cuda").device, model.weight.device, model(x).device}
sys.stdout.write(f"rank {rank} of {torch.cuda.device_count()} GPUs: {before} {' '.join(map(str, devices))}\\n")
"""
TRAINING = """\
import os, torch
import torch.distributed as dist
import smdistributed.dataparallel.torch.torch_smddp
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):  # mpirun's own
    os.environ.setdefault(name, os.environ.get("OMPI_COMM_WORLD_" + name.replace("WORLD_", ""), ""))
dist.init_process_group("smddp")
rank, size = dist.get_rank(), dist.get_world_size()

def losses(model, share):
    optimizer, found = torch.optim.Adam(model.parameters(), 0.01), []
    draw = torch.Generator().manual_seed(1)
    for _ in range(20):
        x = torch.randn(32, 16, generator=draw).cuda()[share]
        loss = (model(x).sum(1) - x.sum(1).sin()).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        found.append(loss.detach())
    return torch.stack(found)

def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).cuda()

ours = losses(torch.nn.parallel.DistributedDataParallel(network()), slice(rank, None, size))
dist.all_reduce(ours, op=dist.ReduceOp.AVG)
torch.testing.assert_close(ours, losses(network(), slice(None)), rtol=1e-4, atol=1e-5)
if rank == 0:
    print(f"equal on {size} ranks, loss {ours[0]:.4f} to {ours[-1]:.4f}, {ours.device}")
dist.destroy_process_group()
"""


def start(run: Run, tree: Tree, launcher: str, ranks: int, variables: dict[str, str]) -> str:
    """Run train.py, and return its output."""
    asked: dict[str, Any] = {launcher: True} if launcher else {}
    tree.hyperparameters(**asked, sagemaker_mpi_num_of_processes_per_host=ranks)
    ended = run(SAGEMAKER_PROGRAM="train.py", **variables)
    assert ended.code == 0, ended.out + ended.err
    return ended.out


@pytest.mark.parametrize(
    "launcher", ["", MPI, TORCHRUN, *(pytest.param(name, marks=by_mpirun_too) for name in (SMDDP, DDP))]
)
def test_each_rank_of_a_plain_script_is_on_the_gpu(
    run: Run, tree: Tree, launcher: str, variables: dict[str, str]
) -> None:
    ranks = 2 if launcher else 1
    tree.script(PLAIN)
    found = sorted(line[line.index("rank ") :] for line in start(run, tree, launcher, ranks, variables).splitlines())
    begun = not IS_REAL  # a rehearsal begins when torch is imported
    assert found == [f"rank {rank} of {GPUS} GPUs: {begun} cuda:{rank % GPUS}" for rank in range(ranks)]


@pytest.mark.parametrize("launcher", [SMDDP, TORCHRUN, pytest.param(MPI, marks=by_mpirun_too)])
def test_two_ranks_train_as_one_process(run: Run, tree: Tree, launcher: str, variables: dict[str, str]) -> None:
    tree.script(TRAINING)
    out = start(run, tree, launcher, 2, variables)
    assert re.search(r"equal on 2 ranks, loss .*, cuda:0", out), out


def test_one_rank_trains_on_nccl(run: Run, tree: Tree, variables: dict[str, str]) -> None:
    tree.script(TRAINING)
    engine = {"SMDDP_ENGINE": "nccl"} if IS_REAL else {}
    assert "equal on 1 ranks" in start(run, tree, TORCHRUN, 1, {**variables, **engine})


@on_a_gpu
@pytest.mark.parametrize("visible", ["0", "", "uuid"])
def test_only_visible_gpus_count(run: Run, tree: Tree, visible: str, variables: dict[str, str]) -> None:
    import torch

    if visible == "uuid":
        visible = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    tree.script(
        "import torch; print('sees', torch.cuda.device_count(), torch.cuda.is_available())\n"
        "if torch.cuda.is_available(): print(torch.ones(1).cuda().device)"
    )
    found = start(run, tree, TORCHRUN, 1, {**variables, "CUDA_VISIBLE_DEVICES": visible})
    assert ("sees 1 True" in found and "cuda:0" in found) if visible else "sees 0 False" in found


FAILURES = {
    "out of memory": ("torch.empty(1 << 46, dtype=torch.uint8, device='cuda')", "OutOfMemoryError: CUDA out of memory"),
    "a label outside": (
        "torch.nn.functional.cross_entropy(torch.zeros(2, 3).cuda(), torch.tensor([0, 7]).cuda()).item()",
        "device-side assert triggered",
    ),
    "two devices": ("torch.ones(1).cuda() + torch.ones(2)", "Expected all tensors to be on the same device"),
    "no such GPU": ("torch.ones(1, device='cuda:77')", "invalid device ordinal"),
    "an access outside": ("x = torch.ones(4).cuda(); x[torch.tensor([9]).cuda()].cpu()", "device-side assert"),
}


@on_a_gpu
@pytest.mark.parametrize("launcher", [MPI, TORCHRUN])
@pytest.mark.parametrize(("lines", "message"), FAILURES.values(), ids=FAILURES)
def test_a_rank_that_fails_on_the_gpu_ends_the_job(
    run: Run, tree: Tree, launcher: str, lines: str, message: str, variables: dict[str, str]
) -> None:
    """The other rank waits for it in a collective. The failure file has CUDA's words."""
    tree.script(
        "import os, torch\nimport torch.distributed as dist\nimport smdistributed.dataparallel.torch.torch_smddp\n"
        "dist.init_process_group('smddp')\ntorch.ones(1).cuda()\n"
        f"if dist.get_rank() == 1:\n    {lines}\ndist.all_reduce(torch.ones(1).cuda())\n"
    )
    tree.hyperparameters(**{launcher: True, "sagemaker_mpi_num_of_processes_per_host": 2})
    ended = run(SAGEMAKER_PROGRAM="train.py", **variables)
    assert ended.code == 1, ended.out + ended.err
    assert message in tree.failure
    assert "rank 1" in tree.failure


@pytest.mark.parametrize("launcher", [MPI, TORCHRUN, ""])
def test_a_job_starts_again_with_its_gpu(run: Run, tree: Tree, launcher: str, variables: dict[str, str]) -> None:
    """The standby process has imported torch, and opened no GPU: otherwise CUDA would not work in what it forks."""
    tree.script(
        "import os, signal, torch\nx = torch.ones(3).cuda()\n"
        "if os.environ['SHOAL_RESTART'] == '0' and os.environ.get('RANK', '0') in '01':\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "print('after', os.environ['SHOAL_RESTART'], x.sum().item(), x.device)\n"
    )
    ranks = 2 if launcher else 1
    out = start(run, tree, launcher, ranks, {**variables, "SHOAL_MAX_RESTARTS": "1"})
    assert out.count("after 1 3.0 cuda:") == ranks, out
    assert tree.report["restarts"][0]["number"] == 1


def test_training_goes_on_exactly(tree: Tree, run: Run, variables: dict[str, str], tmp_path: Path) -> None:
    """Killed twice and resumed on the GPU, against one that ran through: steps, losses and weights, bit by bit."""
    shutil.copy(RANKS / "resuming.py", tree.code / "resuming.py")

    def train(name: str, *words: str) -> int:
        log, kept = tmp_path / name, tmp_path / f"{name}-kept"
        words = (str(kept), str(log), "--device", "cuda", "--workers", "0", *words)
        tree.script(f"import subprocess, sys\nsys.exit(subprocess.call([sys.executable, 'resuming.py', *{words!r}]))")
        tree.hyperparameters()
        return run(SAGEMAKER_PROGRAM="train.py", **variables).code

    def steps(name: str) -> dict[str, str]:
        lines = (tmp_path / f"{name}-0").read_text().splitlines()
        return dict(line.split(" ", 1) for line in lines)

    assert train("whole") == 0
    assert all(train("killed", "--kill-at", step) for step in ("5", "10"))
    assert train("killed") == 0
    assert steps("killed") == steps("whole")


@on_a_gpu
@pytest.mark.parametrize(
    ("script", "words", "more"),
    [
        ("accelerated.py", ["smddp"], {}),
        ("accelerated.py", ["nccl"], {}),
        ("trainer.py", [], {"SM_FRAMEWORK_PARAMS": json.dumps({"sagemaker_distributed_dataparallel_enabled": True})}),
        ("lightning_fit.py", ["gpu"], {}),
    ],
    ids=["accelerate on smddp", "accelerate on nccl", "transformers", "lightning"],
)
def test_everyday_libraries(
    run: Run, tree: Tree, script: str, words: list[str], more: dict[str, str], variables: dict[str, str]
) -> None:
    """One rank: each library takes the GPU of its local rank's number."""
    for name in (script, "plain.py"):
        shutil.copy(EVERYDAY / name, tree.code / name)
    tree.script(
        f"import os, runpy, sys\nsys.argv = {[script, *words]!r}\nos.environ.update({more!r})\n"
        f"os.environ.setdefault('SMDATAPARALLEL_LOCAL_RANK', os.environ['LOCAL_RANK'])\n"
        f"runpy.run_path({script!r}, run_name='__main__')"
    )
    assert "equal: " in start(run, tree, TORCHRUN, 1, variables)


@on_a_gpu
def test_jax_opens_the_gpu(run: Run, tree: Tree, variables: dict[str, str]) -> None:
    tree.script(
        "import os, jax, jax.numpy as jnp\n"
        "print(f\"rank {os.environ['RANK']}: {jax.local_devices()} {jnp.ones(4).sum()}\\n\", end='')"
    )
    out = start(run, tree, TORCHRUN, 2, {**variables, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"})
    assert len(re.findall(r"rank [01]: \[CudaDevice\(id=0\)\] 4.0", out)) == 2, out
