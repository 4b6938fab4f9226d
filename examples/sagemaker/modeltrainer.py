"""Train the digits with SageMaker SDK 3's ModelTrainer: `python modeltrainer.py IMAGE ROLE [mpi|torchrun|train]`.

pip install 'sagemaker-train'. INSTANCE_TYPE=local_cpu runs the job on this machine.

- mpi: the SDK's MPI driver. In our images `train` does the driver's work (docs/sagemaker.md).
- torchrun: the SDK's driver for torchrun.
- train: no driver. The image's `train` reads the hyperparameters, as with SDK 1 and 2.
"""

import os
import sys
from pathlib import Path

from sagemaker.train import ModelTrainer
from sagemaker.train.configs import Compute, InputData, SourceCode
from sagemaker.train.distributed import MPI, Torchrun
from sagemaker.train.model_trainer import Mode

image, role, *rest = sys.argv[1:]
kind = rest[0] if rest else "mpi"
instance_type = os.environ.get("INSTANCE_TYPE", "ml.p4d.24xlarge")
local = instance_type.startswith("local")
digits = Path(__file__).parents[1] / "digits"
ranks = int(os.environ["RANKS"]) if "RANKS" in os.environ else None  # per instance; by default one per GPU
launch = {
    "mpi": {
        "source_code": SourceCode(source_dir=str(digits), entry_script="train.py"),
        "distributed": MPI(process_count_per_node=ranks, mpi_additional_options=["-x", "NCCL_DEBUG=VERSION"]),
        "hyperparameters": {"epochs": 3},
    },
    "torchrun": {
        "source_code": SourceCode(source_dir=str(digits), entry_script="train.py"),
        "distributed": Torchrun(process_count_per_node=ranks),
        "hyperparameters": {"epochs": 3},
    },
    "train": {
        "hyperparameters": {
            "epochs": 3,
            "sagemaker_program": "train.py",
            "sagemaker_submit_directory": "/opt/ml/input/data/digits",
            "sagemaker_mpi_enabled": True,
            **({"sagemaker_mpi_num_of_processes_per_host": ranks} if ranks else {}),
        },
    },
}
trainer = ModelTrainer(
    base_job_name=f"digits-{kind}",
    training_image=image,
    role=role,
    training_mode=Mode.LOCAL_CONTAINER if local else Mode.SAGEMAKER_TRAINING_JOB,
    compute=Compute(instance_type=instance_type, instance_count=2),
    **launch[kind],
)
# Without a driver, the code is a channel like data.
code = [InputData(channel_name="digits", data_source=str(digits))] if kind == "train" else []
trainer.train(input_data_config=code)
