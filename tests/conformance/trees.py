"""The jobs that both toolkits run, as a table: what SageMaker mounts at /opt/ml, and the container's variables.

Strings of hyperparameters stand as in hyperparameters.json. `SDK_*` are what the SageMaker SDK sends, literally.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path

from .layout import PYTORCH, RECORD, TENSORFLOW, Tree

TWO_HOSTS = ("algo-1", "algo-2")
THREE_HOSTS = ("algo-1", "algo-2", "algo-3")

SDK_BASE = {
    "sagemaker_submit_directory": '"/opt/ml/code"',
    "sagemaker_program": '"train.py"',
    "sagemaker_container_log_level": "20",
    "sagemaker_job_name": '"job-2026-01-01-00-00-00-000"',
    "sagemaker_region": '"us-west-2"',
}
SDK_VALUES = {"lr": "0.1", "name": '"a b"', "flag": "true", "n": "null", "lst": '[1, "x"]'}
SDK_DATAPARALLEL = {"sagemaker_distributed_dataparallel_enabled": "true", "sagemaker_instance_type": '"local"'}
TWO_DATAPARALLEL = {**DATAPARALLEL, "sagemaker_mpi_num_of_processes_per_host": "2"}
DIGITS = (Path(__file__).parents[2] / "examples" / "digits" / "train.py").read_text()
LIBRARY = (
    Tree("library-dataparallel", TWO_DATAPARALLEL, {"train.py": ALLREDUCE}),
    Tree("library-dataparallel-two-hosts", DATAPARALLEL, {"train.py": ALLREDUCE}, hosts=TWO_HOSTS),
    Tree("library-mpi", TWO_RANKS, {"train.py": ALLREDUCE}),
)

MODEL_DIR = {"model_dir": '"/opt/ml/model"'}
PARAMETER_SERVER = {"sagemaker_parameter_server_enabled": "true"}
MIRRORED = {"sagemaker_multi_worker_mirrored_strategy_enabled": "true"}
TENSORFLOW_JOBS = (
    Tree("tensorflow-sdk", {**SDK_BASE, **MODEL_DIR}, resources=SDK_RESOURCES),
    Tree("tensorflow-tuning", {"model_dir": '"/opt/ml/model"', "_tuning_objective_metric": '"loss"'}),
    Tree("tensorflow-parameter-server", {**PARAMETER_SERVER, **MODEL_DIR}, hosts=TWO_HOSTS),
    Tree("tensorflow-parameter-server-one-host", {**PARAMETER_SERVER, **MODEL_DIR}),
    Tree("tensorflow-mirrored", {**MIRRORED, **MODEL_DIR}, hosts=TWO_HOSTS),
    Tree("tensorflow-mirrored-one-host", {**MIRRORED, **MODEL_DIR}),
)

TREES = (
    *(tree._replace(framework=PYTORCH) for tree in (*FRAMEWORK_LAUNCHERS, *LIBRARY)),
    *MPI,
    *(tree._replace(framework=TENSORFLOW) for tree in TENSORFLOW_JOBS),
    *RESOURCES,
    *FAILURES,
    *ENTRIES,
    *CHANNELS_AND_VARIABLES,
    *HYPERPARAMETERS,
)
