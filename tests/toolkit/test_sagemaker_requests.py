"""What the real SageMaker SDKs send for examples/sagemaker, as `train` plans it. `make sagemaker` records it."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest

from shoal_toolkit.job import contract
from shoal_toolkit.job.machine import read_instance
from shoal_toolkit.plan.plan import LaunchPlan, make_plan

from ..integration.sagemaker_platform import write_configuration
from ..integration.sagemaker_requests import CASES, RECORDINGS, SDKS, example_digest
from .conftest import Tree
from .test_plan import MACHINE, mca

RECORDED: dict[str, dict[str, Any]] = json.loads(RECORDINGS.read_text())
HOSTS = ("algo-1", "algo-2")


def plan_request(tree: Tree, name: str) -> LaunchPlan:
    """Returns the plan of the first host for a recorded request, on a machine with 8 GPUs."""
    request = RECORDED[name]["request"]
    write_configuration(tree.base, request, HOSTS[: request["ResourceConfig"]["InstanceCount"]], "algo-1")
    paths = contract.Paths(str(tree.base))
    cluster = contract.read_cluster(paths, "box")
    job = contract.read_job(paths, cluster, request.get("Environment") or {}, (), fetch=False)
    return make_plan(job, MACHINE._replace(gpus=8, instance=read_instance(job.instance_type)))


class Expected(NamedTuple):
    launcher: str
    ranks: dict[str, int]
    script: list[str]


BOTH = {"algo-1": 8, "algo-2": 8}
PLANS = {
    "pytorch_dataparallel": Expected("smdataparallel", BOTH, ["train.py", "--epochs", "3"]),
    "sdk1_dataparallel": Expected("smdataparallel", BOTH, ["train.py", "--epochs", "3"]),
    "tensorflow_dataparallel": Expected("smdataparallel", BOTH, ["train_tensorflow.py", "--epochs", "3"]),
    "channels_and_spot-bucket-of-data": Expected(
        "torch_distributed",
        {"algo-1": 8},
        ["train_torch.py", "--checkpoint-dir", "/opt/ml/checkpoints", "--epochs", "3"],
    ),
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_recordings_are_of_these_scripts_and_sdks(case: Any) -> None:
    recording = RECORDED[case.name]
    fresh = {"sdk": SDKS[case.sdk][0], "script": case.script, "script_sha256": example_digest(case.script)}
    assert {key: recording[key] for key in fresh} == fresh, "Fix: make sagemaker"


@pytest.mark.parametrize("name", PLANS)
def test_a_request_starts_what_the_estimator_says(tree: Tree, name: str) -> None:
    plan = plan_request(tree, name)
    expected = PLANS[name]
    assert (plan.launcher, plan.ranks) == (expected.launcher, expected.ranks)
    assert list(plan.script[-len(expected.script) :]) == expected.script


def test_custom_mpi_options_reach_mpirun(tree: Tree) -> None:
    command = plan_request(tree, "pytorch_dataparallel").command
    assert "NCCL_DEBUG=VERSION" in command
    assert {"-verbose", "--verbose", "-v"} & set(command)


def test_model_parallel_parameters_and_the_option_that_aws_refuses(tree: Tree) -> None:
    plan = plan_request(tree, "pytorch_modelparallel")
    assert (plan.launcher, plan.ranks) == ("mpi", {"algo-1": 8})
    assert mca(plan.command)["btl_vader_single_copy_mechanism"] == "none"
    parameters = json.loads(plan.env["SM_HP_MP_PARAMETERS"])
    assert (parameters["partitions"], parameters["pipeline"], parameters["ddp"]) == (4, "interleaved", True)


def test_channels_of_a_file_system_of_s3_and_of_a_pipe(tree: Tree) -> None:
    plan = plan_request(tree, "channels_and_spot-bucket-of-data")
    assert json.loads(plan.env["SM_CHANNELS"]) == ["stream", "training", "validation"]
    assert plan.env["SM_CHANNEL_TRAINING"] == f"{tree.base}/input/data/training"
    assert [note.partition(":")[0] for note in plan.notes if "Pipe" in note] == ["the channel stream is in Pipe mode"]


def test_no_recording_is_left_over() -> None:
    assert set(RECORDED) == {case.name for case in CASES}
