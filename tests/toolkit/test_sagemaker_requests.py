"""What the real SageMaker SDKs send for examples/sagemaker, as `train` plans it. `make sagemaker` records it."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest

from shoal_toolkit.hooks.sdk_driver import build_train_variables
from shoal_toolkit.job import contract
from shoal_toolkit.job.machine import read_instance
from shoal_toolkit.plan.plan import LaunchPlan, make_plan

from ..integration.sagemaker_platform import build_command, write_configuration
from ..integration.sagemaker_requests import CASES, RECORDINGS, SDKS, example_digest
from .conftest import Tree
from .test_plan import MACHINE, mca

RECORDED: dict[str, dict[str, Any]] = json.loads(RECORDINGS.read_text())
HOSTS = ("algo-1", "algo-2")
DATA = "/opt/ml/input/data"


def plan_request(tree: Tree, name: str, **variables: str) -> LaunchPlan:
    """Returns the plan of the first host for a recorded request, on a machine with 8 GPUs."""
    request = json.loads(json.dumps(RECORDED[name]["request"]).replace(DATA, f"{tree.base}/input/data"))
    for address in RECORDED[name]["uploads"]:
        _, channel, path = address.partition("/input/")
        if channel:  # the plan asks for the files' names only
            (tree.base / "input/data" / path).parent.mkdir(parents=True, exist_ok=True)
            (tree.base / "input/data" / path).touch()
    write_configuration(tree.base, request, HOSTS[: request["ResourceConfig"]["InstanceCount"]], "algo-1")
    paths = contract.Paths(str(tree.base))
    cluster = contract.read_cluster(paths, "box")
    environ = {**(request.get("Environment") or {}), **variables}
    job = contract.read_job(paths, cluster, environ, (), fetch=False)
    return make_plan(job, MACHINE._replace(gpus=8, instance=read_instance(job.instance_type)))


def read_upload(name: str, file: str) -> str:
    """Returns the recorded digest or text of a file in SDK 3's channel sm_drivers."""
    (found,) = (kept for address, kept in RECORDED[name]["uploads"].items() if address.endswith(f"/sm_drivers/{file}"))
    return str(found)


class Expected(NamedTuple):
    launcher: str
    ranks: dict[str, int]
    script: list[str]


BOTH = {"algo-1": 8, "algo-2": 8}
MODEL_DIR = ("--model_dir", "s3://sagemaker-us-west-2-123456789012/JOB/model")
"""The TensorFlow estimator passes it, unless it has `model_dir=False`."""
PLANS = {
    "pytorch_dataparallel": Expected("smdataparallel", BOTH, ["train.py", "--epochs", "3"]),
    "sdk1_dataparallel": Expected("smdataparallel", BOTH, ["train.py", "--epochs", "3"]),
    "sdk1_tensorflow": Expected("smdataparallel", BOTH, ["train_tensorflow.py", "--epochs", "3", *MODEL_DIR]),
    "tensorflow_dataparallel": Expected("smdataparallel", BOTH, ["train_tensorflow.py", "--epochs", "3", *MODEL_DIR]),
    "channels_and_spot-bucket-of-data": Expected(
        "torch_distributed",
        {"algo-1": 8},
        ["train_torch.py", "--checkpoint-dir", "/opt/ml/checkpoints", "--epochs", "3"],
    ),
    "data_parallel_pytorch": Expected("smdataparallel", BOTH, ["train.py", "--epochs", "5"]),
    "data_parallel_tensorflow": Expected("smdataparallel", BOTH, ["train_keras.py", "--epochs", "5"]),
    "huggingface_finetune-bucket-of-data": Expected(
        "smdataparallel", BOTH, ["train.py", "--epochs", "3", "--model", "distilbert-base-uncased"]
    ),
    "modeltrainer-train": Expected("mpi", BOTH, ["train.py", "--epochs", "3"]),
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_recordings_are_of_these_scripts_and_sdks(case: Any) -> None:
    recording = RECORDED[case.name]
    fresh = {"sdk": SDKS[case.sdk][0], "script": case.script, "script_sha256": example_digest(case.script)}
    assert {key: recording[key] for key in fresh} == fresh, "Fix: make sagemaker"


@pytest.mark.parametrize("name", PLANS)
def test_a_request_starts_the_launcher_of_the_estimator(tree: Tree, name: str) -> None:
    plan = plan_request(tree, name)
    expected = PLANS[name]
    assert (plan.launcher.name, plan.ranks) == (expected.launcher, expected.ranks)
    assert list(plan.script[-len(expected.script) :]) == expected.script


def test_the_notebook_of_model_parallelism_starts_mpirun(tree: Tree) -> None:
    plan = plan_request(tree, "model_parallel")
    assert (plan.launcher.name, plan.ranks) == ("mpi", {"algo-1": 2})
    assert json.loads(plan.env["SM_HP_MP_PARAMETERS"])["partitions"] == 2


def test_custom_mpi_options_reach_mpirun(tree: Tree) -> None:
    command = plan_request(tree, "pytorch_dataparallel").command
    assert "NCCL_DEBUG=VERSION" in command
    assert {"-verbose", "--verbose", "-v"} & set(command)


def test_model_parallel_parameters_and_the_option_that_aws_refuses(tree: Tree) -> None:
    plan = plan_request(tree, "pytorch_modelparallel")
    assert (plan.launcher.name, plan.ranks) == ("mpi", {"algo-1": 8})
    assert mca(plan.command)["btl_vader_single_copy_mechanism"] == "none"
    parameters = json.loads(plan.env["SM_HP_MP_PARAMETERS"])
    assert (parameters["partitions"], parameters["pipeline"], parameters["ddp"]) == (4, "interleaved", True)


def test_channels_of_a_file_system_of_s3_and_of_a_pipe(tree: Tree) -> None:
    plan = plan_request(tree, "channels_and_spot-bucket-of-data")
    assert json.loads(plan.env["SM_CHANNELS"]) == ["stream", "training", "validation"]
    assert plan.env["SM_CHANNEL_TRAINING"] == f"{tree.base}/input/data/training"
    assert [note.partition(":")[0] for note in plan.notes if "Pipe" in note] == ["the channel stream is in Pipe mode"]


@pytest.mark.parametrize("kind", ["mpi", "torchrun"])
def test_model_trainer_sends_its_drivers_and_a_command_that_runs_them(kind: str) -> None:
    request = RECORDED[f"modeltrainer-{kind}"]["request"]
    script = f"{DATA}/sm_drivers/sm_train.sh"
    assert build_command(request) == {"entrypoint": ["/bin/bash"], "command": ["-c", f"chmod +x {script} && {script}"]}
    assert [channel["ChannelName"] for channel in request["InputDataConfig"]] == ["code", "sm_drivers"]
    assert len(read_upload(f"modeltrainer-{kind}", f"distributed_drivers/{kind}_driver.py")) == 64


def test_without_a_driver_model_trainer_sends_no_command() -> None:
    request = RECORDED["modeltrainer-train"]["request"]
    assert build_command(request) == {"command": "train"}
    assert [channel["ChannelName"] for channel in request["InputDataConfig"]] == ["digits"]


def test_train_has_the_job_of_the_mpi_driver(tree: Tree) -> None:
    name = "modeltrainer-mpi"
    environ = {
        "SM_ENTRY_SCRIPT": json.loads(read_upload(name, "sourcecode.json"))["entry_script"],
        "SM_DISTRIBUTED_CONFIG": read_upload(name, "distributed.json"),
    }
    plan = plan_request(tree, name, **build_train_variables(environ, f"{tree.base}/input/data/code"))
    assert (plan.launcher.name, plan.ranks) == ("mpi", BOTH)
    assert list(plan.script[-3:]) == ["train.py", "--epochs", "3"]
    assert "NCCL_DEBUG=VERSION" in plan.command
    assert plan.env["SM_CHANNEL_SM_DRIVERS"] == f"{tree.base}/input/data/sm_drivers"


def test_no_recording_is_left_over() -> None:
    assert set(RECORDED) == {case.name for case in CASES}
