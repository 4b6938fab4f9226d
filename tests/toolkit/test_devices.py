"""The GPU of a rank that selects none: with each launcher in rehearsals, and each framework's own functions."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal_toolkit.hooks.devices import find_local_device

from .conftest import Run, Tree
from .test_imports import REHEARSAL, TOOLKIT, packages
from .test_imports import run as run_rank
from .test_launcher import DDP, MPI, MWMS, PS, SMDDP, TORCHRUN
from .test_plan import MACHINE, planned

__all__ = ["packages"]

BY_TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
BY_MPIRUN = {f"OMPI_COMM_WORLD_{name}": value for name, value in BY_TORCHRUN.items() if name in ("RANK",)} | {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
# Ways in which scripts name a GPU without a number.
PLAIN = """\
import os, sys, torch
assert "CUDA_VISIBLE_DEVICES" not in os.environ
x = torch.ones(2, 2).cuda()
y = torch.zeros(2, device=torch.device("cuda"))
model = torch.nn.Linear(2, 2).to("cuda")
rank = os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK") or os.environ["LOCAL_RANK"]
devices = [x.device, y.device, model.weight.device, model(x).device]
sys.stdout.write(f"rank {rank}: {' '.join(str(device) for device in devices)}\\n")
"""


@pytest.mark.parametrize(
    ("asked", "ranks", "command"),
    [
        ({MPI: True}, 4, ""),
        ({MPI: True, "mp_parameters": {"partitions": 2}}, 2, ""),
        ({SMDDP: True}, 2, ""),
        ({TORCHRUN: True}, 4, ""),
        ({PS: True}, 2, "torchrun --nproc-per-node 2 plain.py"),
        ({}, 2, "mpirun --allow-run-as-root -np 2 python plain.py"),
    ],
    ids=["mpi", "model parallel", "smdataparallel", "torch_distributed", "own torchrun", "own mpirun"],
)
def test_each_rank_of_a_plain_script_uses_its_own_gpu(
    tree: Tree, run: Run, packages: Path, asked: dict[str, Any], ranks: int, command: str
) -> None:
    tree.script(PLAIN, "plain.py")
    tree.script(command, "go.sh")
    tree.hyperparameters(**asked, **({} if command else {"sagemaker_mpi_num_of_processes_per_host": ranks}))
    done = run(
        SAGEMAKER_PROGRAM="go.sh" if command else "plain.py",
        SHOAL_REHEARSE="1",
        SHOAL_REHEARSE_GPUS=str(ranks),
        PYTHONPATH=os.pathsep.join(map(str, (packages, TOOLKIT, REHEARSAL))),
        PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        OMPI_MCA_plm_rsh_agent="ssh:rsh:/bin/false",
    )
    assert done.code == 0, done.err
    assert sorted(line[line.index("rank ") :] for line in done.out.splitlines()) == [
        f"rank {rank}: {' '.join([f'cuda:{rank}'] * 4)}" for rank in range(ranks)
    ]


# Lines of a script, its variables beside those of a rehearsal of four GPUs, and the current GPU afterwards.
CHOICES = {
    "first use is a tensor": ("torch.ones(1).cuda()", BY_TORCHRUN, 1),
    "first use asks for the current device": ("torch.cuda.current_device()", BY_TORCHRUN, 1),
    "only variables of mpirun": ("torch.ones(1).cuda()", BY_MPIRUN, 1),
    "a script that ran once calls mpirun": ("torch.ones(1).cuda()", {**ALONE, **BY_MPIRUN}, 1),
    "the script selects one first": ("torch.cuda.set_device(3); torch.ones(1).cuda()", BY_TORCHRUN, 3),
    "the script selects the first one": ("torch.cuda.set_device(0); torch.ones(1).cuda()", BY_TORCHRUN, 0),
    "the script selects one later": ("torch.ones(1).cuda(); torch.cuda.set_device('cuda:2')", BY_TORCHRUN, 2),
    "a block that selects one": ("with torch.cuda.device(3): torch.ones(1).cuda()", BY_TORCHRUN, 1),
    "fewer GPUs than ranks": ("torch.ones(1).cuda()", {**BY_TORCHRUN, "LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "8"}, 1),
    "one rank": ("torch.ones(1).cuda()", ALONE, 0),
    "no launcher": ("torch.ones(1).cuda()", {}, 0),
}
IN_FORKS = """\
import json, os, sys, torch
for name, (lines, variables, _) in json.loads(os.environ.pop("CHOICES")).items():
    if os.fork() == 0:  # as a standby starts ranks: torch is imported before the rank is known
        os.environ.update(variables)
        exec(lines)
        print(name, torch.cuda.current_device(), sep=": ", flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, name
"""


@pytest.mark.parametrize("switch", ["1", "0"])
def test_the_choice_of_the_script_wins(packages: Path, switch: str) -> None:
    off = {"first use is a tensor", "first use asks for the current device", "only variables of mpirun"}
    off |= {"a script that ran once calls mpirun", "a block that selects one", "fewer GPUs than ranks"}
    variables = {"SHOAL_REHEARSE": "1", "SHOAL_REHEARSE_GPUS": "4", "SHOAL_SET_DEVICE": switch}
    assert run_rank(packages, IN_FORKS, CHOICES=json.dumps(CHOICES), **variables) == [
        f"{name}: {0 if switch == '0' and name in off else device}" for name, (_, _, device) in CHOICES.items()
    ]


# Replaces the functions of CUDA, below torch's own initialization. As in torch, each C function initializes first.
DRIVER = """\
import os, torch
calls = []
def call(name, result=None):
    def function(*arguments):
        torch.cuda._lazy_init()
        calls.append((name, *arguments))
        return result
    return function
count = int(os.environ["COUNT"])
torch.cuda._cudart = object()
torch.cuda.device_count = torch._C._cuda_getDeviceCount = lambda: count
torch.cuda.default_generators = [torch.Generator()] * count  # torch.manual_seed is queued too
torch._C._cuda_init = lambda: calls.append(("init",))
torch._C._cuda_setDevice = call("set")
torch._C._cuda_getDevice = call("get", 0)
"""


@pytest.mark.parametrize(
    ("count", "use", "calls"),
    [
        ("4", "torch.cuda.current_device()", ["init", "set 1", "get"]),
        ("4", "torch.cuda.set_device(2)", ["init", "set 1", "set 2"]),
        ("1", "torch.cuda.current_device()", ["init", "set 0", "get"]),
        ("0", "torch.cuda.init()", ["init"]),
    ],
)
def test_torch_selects_the_gpu_when_it_initializes_cuda(packages: Path, count: str, use: str, calls: list[str]) -> None:
    """Without a rehearsal, torch's own initialization. One GPU: a launcher shows each rank its own."""
    program = f"""{DRIVER}
torch.manual_seed(0)
print(torch.cuda.is_initialized(), calls, os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
if os.fork() == 0:
    {use}
    print([" ".join(map(str, call)) for call in calls], torch.cuda.is_initialized(), flush=True)
    os._exit(0)
assert os.wait()[1] == 0
print(torch.cuda.is_initialized())"""
    assert run_rank(packages, program, COUNT=count, **BY_TORCHRUN) == ["False [] None", f"{calls} True", "False"]


TENSORFLOW = {
    "tensorflow/__init__.py": """\
from collections import namedtuple
from types import SimpleNamespace
from tensorflow.python.eager.context import context
config = SimpleNamespace(
    list_physical_devices=context.list_physical_devices,
    get_visible_devices=context.get_visible_devices,
    set_visible_devices=context.set_visible_devices,
)
""",
    "tensorflow/python/eager/context.py": """\
import os
class Context:
    _physical = None
    def _initialize_physical_devices(self):
        if self._physical is None:
            self._physical = [f"GPU:{number}" for number in range(int(os.environ["COUNT"]))]
            self.visible = self._physical
            print("opened")
    def list_physical_devices(self, kind):
        self._initialize_physical_devices()
        return list(self._physical)
    def get_visible_devices(self, kind):
        self._initialize_physical_devices()
        return self.visible
    def set_visible_devices(self, devices, kind):
        self._initialize_physical_devices()
        self.visible = devices
context = Context()
""",
}
JAX = {
    "jax/__init__.py": """\
from types import SimpleNamespace
values = {"jax_cuda_visible_devices": "all"}
config = SimpleNamespace(read=values.__getitem__, update=values.__setitem__)
from jax._src import xla_bridge
""",
    "jax/_src/xla_bridge.py": """\
import jax
def backends():
    print("opened", jax.config.read("jax_cuda_visible_devices"))
""",
}


def make_package(site: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)


@pytest.mark.parametrize(
    ("variables", "script", "expected"),
    [
        ({}, "", ["opened", "['GPU:1']"]),
        (
            {},
            "tf.config.set_visible_devices(tf.config.list_physical_devices('GPU')[3:], 'GPU')",
            ["opened", "['GPU:3']"],
        ),
        ({}, "tf.config.set_visible_devices([], 'GPU')", ["opened", "[]"]),
        ({"COUNT": "1"}, "", ["opened", "['GPU:0']"]),
        ({"COUNT": "0"}, "", ["opened", "[]"]),
        (ALONE, "", ["opened", "['GPU:0', 'GPU:1', 'GPU:2', 'GPU:3']"]),
        ({"SHOAL_SET_DEVICE": "0"}, "", ["opened", "['GPU:0', 'GPU:1', 'GPU:2', 'GPU:3']"]),
    ],
)
def test_tensorflow_sees_the_gpu_of_the_local_rank(
    packages: Path, variables: dict[str, str], script: str, expected: list[str]
) -> None:
    """With a stand-in for TensorFlow: tests/library_tensorflow has the same with TensorFlow itself."""
    make_package(packages, TENSORFLOW)
    program = f"import tensorflow as tf; print('imported'); {script}\nprint(tf.config.get_visible_devices('GPU'))"
    given = {**BY_TORCHRUN, "COUNT": "4", **variables}
    assert run_rank(packages, program, **given) == ["imported", *expected]


@pytest.mark.parametrize(
    ("variables", "script", "visible"),
    [
        ({}, "", "1"),
        ({}, "jax.config.update('jax_cuda_visible_devices', '2,3')", "2,3"),
        ({}, "import os; os.environ['CUDA_VISIBLE_DEVICES'] = '1'", "0"),
        ({"CUDA_VISIBLE_DEVICES": "6,7"}, "", "1"),
        ({"SM_NUM_GPUS": "0"}, "", "all"),
        (ALONE, "", "all"),
        ({"SHOAL_SET_DEVICE": "0"}, "", "all"),
    ],
)
def test_jax_opens_the_gpu_of_the_local_rank(
    packages: Path, variables: dict[str, str], script: str, visible: str
) -> None:
    """With a stand-in for JAX, which the images do not have."""
    make_package(packages, JAX)
    given = {**BY_TORCHRUN, "SM_NUM_GPUS": "4", **variables}
    program = f"import jax; print('imported')\n{script}\njax._src.xla_bridge.backends()"
    assert run_rank(packages, program, **given) == ["imported", f"opened {visible}"]


ENVIRONMENTS = (
    *({**BY_TORCHRUN, "LOCAL_RANK": str(rank)} for rank in (0, 1, 2, 3, 4)),
    *(BY_MPIRUN, {**BY_TORCHRUN, **BY_MPIRUN}, {**ALONE, **BY_MPIRUN}, ALONE, {}),
    {**BY_MPIRUN, "RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"},  # of model parallelism
    {**BY_TORCHRUN, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("environ", ENVIRONMENTS)
def test_the_library_selects_the_same_device(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], count: int
) -> None:
    import torch

    from smdistributed.core.torch.devices import select_device

    selected = [0]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: selected[-1])
    monkeypatch.setattr(torch.cuda, "set_device", selected.append)
    for name in {name for each in ENVIRONMENTS for name in each}:
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    select_device()
    assert selected[-1] == (find_local_device(count, environ) or 0)


@pytest.mark.parametrize(
    ("asked", "gpus", "variables", "expected"),
    [
        *(({key: True}, 4, {}, "each rank uses the GPU of its local rank") for key in (MPI, DDP, SMDDP, TORCHRUN)),
        ({TORCHRUN: True}, 4, {"SHOAL_SET_DEVICE": "0"}, "the script selects the GPU of each rank, because SHOAL_SET"),
        ({TORCHRUN: True}, 1, {}, ""),
        *(({key: True}, 4, {}, "") for key in (PS, MWMS)),
    ],
)
def test_explain_has_the_rule(
    tree: Tree, asked: dict[str, bool], gpus: int, variables: dict[str, str], expected: str
) -> None:
    tree.hyperparameters(**asked)
    reasons = planned(tree, MACHINE._replace(gpus=gpus), (), **variables).reasons
    assert [reason.startswith(f"GPUs: {expected}") for reason in reasons if "GPUs: " in reason] == [True] * bool(
        expected
    )
