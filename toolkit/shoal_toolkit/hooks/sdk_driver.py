"""Runs `train` in place of the MPI driver of SageMaker SDK 3, which imports paramiko and needs sshd on every host.

If paramiko is installed, the driver runs as it is. Importing this module does nothing.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping

_DRIVER = os.path.join("sm_drivers", "distributed_drivers", "mpi_driver.py")


def build_train_variables(environ: Mapping[str, str], code_dir: str) -> dict[str, str]:
    """Returns the variables with which `train` runs the driver's job.

    Args:
        environ: The environment of the driver: SM_ENTRY_SCRIPT, and SM_DISTRIBUTED_CONFIG with the fields of the
            SDK's class MPI.
        code_dir: The directory of the user's code, from which the SDK's script starts the driver.
    """
    config = json.loads(environ["SM_DISTRIBUTED_CONFIG"])
    hyperparameters: dict[str, object] = {"sagemaker_mpi_enabled": True, "sagemaker_json_arguments": True}
    if config.get("process_count_per_node"):
        hyperparameters["sagemaker_mpi_num_of_processes_per_host"] = config["process_count_per_node"]
    if config.get("mpi_additional_options"):
        hyperparameters["sagemaker_mpi_custom_mpi_options"] = shlex.join(config["mpi_additional_options"])
    return {
        "SAGEMAKER_PROGRAM": environ["SM_ENTRY_SCRIPT"],
        "SAGEMAKER_SUBMIT_DIRECTORY": code_dir,
        "SHOAL_SDK_HYPERPARAMETERS": json.dumps(hyperparameters),
    }


def replace_driver() -> None:
    """Replaces this process by `train`, with a line on stderr that says so, if it is the driver. Otherwise returns."""
    if not sys.argv[0].endswith(_DRIVER):
        return
    print(
        "train: this image has no paramiko and no sshd for the MPI driver of the SageMaker SDK. `train` runs the job "
        "instead, with the same script, hyperparameters, ranks per host and options of mpirun.",
        file=sys.stderr,
        flush=True,
    )
    train = os.path.join(os.path.dirname(sys.executable), "train")
    os.execve(train, [train], {**os.environ, **build_train_variables(os.environ, os.getcwd())})
