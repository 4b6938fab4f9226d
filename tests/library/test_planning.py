"""`python -m smdistributed.modelparallel plan`: what it predicts, recommends and refuses."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest
import torch
from torch import nn

from smdistributed.modelparallel.backend.config import check
from smdistributed.modelparallel.torch.pipeline.activations import set_activation_checkpointing
from smdistributed.modelparallel.torch.plan import planning
from smdistributed.modelparallel.torch.plan.auto_partition import auto_partition
from smdistributed.modelparallel.torch.plan.trace import trace

if TYPE_CHECKING:
    from tests.library.conftest import Python

MODELS = """\
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

@dataclass
class Batch:
    value: torch.Tensor
    scale: float = 2.0

class Scales(nn.Linear):
    def forward(self, batch: Batch):
        return super().forward(batch.value) * batch.scale

def classes():
    return Scales(4, 4), (Batch(torch.ones(3, 4)),)

def empty():
    return nn.Linear(4, 4), (torch.ones(0, 4),)

def wide():  # 16 GiB with Adam, and too large for the test to construct
    return nn.Sequential(*(nn.Linear(8192, 8192, bias=False) for _ in range(16))), (torch.empty(16, 8192),)

def small():
    return nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)), (), {"input": torch.empty(4096, 256)}

def tensor():
    return nn.Linear(4, 4), torch.ones(3, 4)

def named():
    return nn.Linear(4, 4), {"input": torch.ones(3, 4)}

def sharded():
    model = nn.Linear(4, 4)
    model.weight.device_mesh = "as of a DTensor"
    return model, torch.ones(3, 4)

def talks():
    print("logged")
    return small()

def alone():
    return nn.Linear(4, 4)

def asks():
    class Asks(nn.Module):
        def forward(self, value):
            return value.numpy()
    return Asks(), (torch.ones(3),)

def breaks():
    raise OSError("no such configuration")
"""
LAYER = 8192 * 8192 * 4 * 4  # the weight, its gradient and two moments of Adam, in bytes
GIB = 1 << 30


class Plan(Protocol):
    def __call__(self, name: str, *options: str) -> subprocess.CompletedProcess[str]: ...


@pytest.fixture
def plan(python: Python, tmp_path: Path) -> Plan:
    """Run the command on one of the models."""
    (tmp_path / "models.py").write_text(MODELS)
    words = [*python(), "-m", "smdistributed.modelparallel", "plan"]

    def run(name: str, *options: str) -> subprocess.CompletedProcess[str]:
        command = [*words, f"models.py:{name}", *options]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)

    return run


def recommended(ended: subprocess.CompletedProcess[str]) -> dict[str, object]:
    assert ended.returncode == 0, ended.stderr
    found: dict[str, object] = json.loads(ended.stdout.rpartition("recommended: ")[2])
    return found


def test_the_fewest_devices_on_which_a_model_fits(plan: Plan) -> None:
    ended = plan("wide", "--memory", "9")
    assert recommended(ended) == {"partitions": 2, "microbatches": 16, "active_microbatches": 4}
    assert ended.stdout.count("does not fit") == 4, "one device, whatever the microbatches"
    (sizes,) = [line.split()[4:] for line in ended.stdout.splitlines() if line.split()[:3] == ["2", "16", "4"]]
    assert [float(size) for size in sizes] == pytest.approx([8 * LAYER / GIB] * 2, abs=0.02)
    assert "stage 1:  50.0%  8, 9, 10, 11, 12, 13, 14, 15" in ended.stdout


def test_given_parameters_are_kept(plan: Plan) -> None:
    given = {"partitions": 4, "microbatches": 4, "pipeline": "simple"}
    assert given.items() <= recommended(plan("wide", "--mp-parameters", json.dumps(given))).items()


def test_what_backward_needs_counts_once(plan: Plan) -> None:
    """The result of the ReLU, which both neighbours keep; not the batch, not the results that nobody needs."""
    ended = plan("small", "--mp-parameters", '{"partitions": 1, "microbatches": 1}', "--optimizer", "sgd")
    (line,) = [line for line in ended.stdout.splitlines() if line.split()[:2] == ["1", "1"]]
    parameters = 2 * (2 * 256 * 1024 + 256 + 1024) * 4
    assert float(line.split()[4]) == pytest.approx((4096 * 1024 * 4 + parameters) / GIB, abs=0.006)


def test_a_batch_may_be_of_a_class_of_the_models_file(plan: Plan) -> None:
    assert recommended(plan("classes"))["partitions"] == 1


@pytest.mark.parametrize("name", ["tensor", "named"])
def test_a_batch_is_a_tensor_or_a_dict(plan: Plan, name: str) -> None:
    assert recommended(plan(name))["partitions"] == 1


def model_of(module: nn.Module, batch: torch.Tensor, **named: torch.Tensor) -> planning.PlannedModel:
    return planning.PlannedModel(module, len(batch), trace(module, (batch,), named))


@pytest.mark.parametrize(
    ("batch", "given", "microbatches"),
    [
        (12, {}, [1, 2, 4, 6, 12]),
        (12, {"uneven_microbatches": True}, [1, 2, 4, 8]),
        (9, {}, [1, 3, 9]),
        (96, {}, [1, 2, 4, 8, 16]),
    ],
)
def test_microbatches_divide_the_batch(batch: int, given: dict[str, Any], microbatches: list[int]) -> None:
    model = model_of(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(batch, 4))
    plans = planning.candidates(model, {"partitions": 2, **given}, 8, "adam")
    assert sorted({found.config.microbatches for found in plans}) == microbatches


def test_the_cut_is_that_of_a_run_which_traces_one_microbatch() -> None:
    sizes = [64, 512, 64, 512, 1024, 1024, 64]
    layers = [nn.Sequential(nn.Linear(one, other), nn.Tanh()) for one, other in zip(sizes, sizes[1:])]
    model, config = nn.Sequential(*layers), check({"partitions": 2, "microbatches": 8})
    planned = planning.plan(model_of(model, torch.ones(4096, 64)), config).partition
    run = auto_partition(model, config, (torch.ones(512, 64),), {})
    assert planned.stages == run.stages
    assert planned.shares == pytest.approx(run.shares, rel=1e-4)


class Block(nn.Sequential):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = value + super().forward(value)  # type: ignore[no-untyped-call]
        return found


MIB = 1 << 20


@pytest.mark.parametrize(
    ("strategy", "kept"), [(None, 36 * MIB), ("each", 4 * MIB), ("group_2", 0), ("contiguous", 0), ("second", 20 * MIB)]
)
def test_checkpointed_modules_keep_what_enters_them(strategy: str | None, kept: int) -> None:
    blocks = (Block(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)) for _ in range(2))
    module = nn.Sequential(*blocks)
    if strategy == "second":
        set_activation_checkpointing(module[1])
    elif strategy:
        set_activation_checkpointing(module, strategy=strategy)
    found = trace(module, (torch.empty(4096, 256),), {})
    assert sum(found.activation_bytes.values()) == kept
    assert all("forward" not in part.__dict__ for part in module.modules())


@pytest.mark.parametrize(
    ("dtype", "given", "each"),
    [
        (torch.float32, {}, 4 + 4 + 8),
        (torch.float32, {"bf16": True}, 2 + 2 + 4 + 4 + 8),
        (torch.bfloat16, {}, 2 + 2 + 4),
        (torch.bfloat16, {"bf16": True}, 2 + 2 + 4 + 4 + 8),
        (torch.float16, {"fp16": True, "shard_optimizer_state": True}, 2 + 2 + 4 + 4 + 8 / 4),
    ],
)
def test_what_the_optimizer_has_is_counted(dtype: torch.dtype, given: dict[str, Any], each: float) -> None:
    trained = [nn.Parameter(torch.empty(100, dtype=dtype)) for _ in range(4)]
    frozen = nn.Parameter(torch.empty(100, dtype=torch.float32), requires_grad=False)
    config, size = check({"partitions": 1, "ddp": True, **given}), 2 if {"fp16", "bf16"} & set(given) else 4
    assert planning.state_bytes([*trained, frozen], config, "adam", replicas=4) == 400 * each + 100 * size


def test_json_has_what_the_table_has_and_nothing_else_is_on_standard_output(plan: Plan) -> None:
    ended = plan("talks", "--json", "--devices", "2")
    document = json.loads(ended.stdout)
    assert (ended.returncode, "logged" in ended.stderr) == (0, True)
    assert document["recommended"].keys() == {"partitions", "microbatches", "active_microbatches"}
    assert document["recommended"] in [{name: of[name] for name in document["recommended"]} for of in document["plans"]]
    assert len(document["partition"]["shares"]) == document["recommended"]["partitions"]
    assert all(of["fits"] and len(of["stage_bytes"]) == of["partitions"] for of in document["plans"])
    none = plan("wide", "--json", "--memory", "1", "--devices", "4")
    document = json.loads(none.stdout)
    assert (none.returncode, document["recommended"], document["partition"]) == (1, None, None)
    assert not any(of["fits"] for of in document["plans"])


def test_plan_fails_if_nothing_fits(plan: Plan) -> None:
    ended = plan("wide", "--memory", "1", "--devices", "4")
    assert ended.returncode == 1
    assert "Nothing fits 1 GiB on up to 4 devices: 4.0" in ended.stdout


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("small", ["--mp-parameters", '{"partitions": 5}'], "has 3 modules that can be on stages of their own"),
        (
            "small",
            ["--mp-parameters", '{"pipeline_parallel_degree": 16}'],
            "'partitions' is 16, but the model has 3 modules",
        ),
        ("small", ["--mp-parameters", '{"partitions": 0}'], "Allowed: 1 or more"),
        ("empty", [], "models.py:empty gives an empty batch"),
        ("small", ["--mp-parameters", "[]"], "expected a JSON object"),
        ("small", ["--devices", "0"], "expected 1 or more, found 0"),
        ("smal", [], "models.py has no function 'smal'"),
        ("sharded", [], "returns a sharded model: weight is a DTensor"),
        ("alone", [], "must return (module, batch)"),
        ("asks", [], "cannot run on the meta device"),
        ("breaks", [], "raised OSError on the meta device: no such configuration"),
    ],
)
def test_what_cannot_be_planned_is_reported(plan: Plan, name: str, options: list[str], words: str) -> None:
    ended = plan(name, *options)
    assert ended.returncode == 2
    assert words in ended.stderr
