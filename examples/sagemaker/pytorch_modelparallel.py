"""Train the digits with a model in 4 stages and its replicas: `python pytorch_modelparallel.py IMAGE ROLE`.

SageMaker SDK 2: pip install 'sagemaker<3'. INSTANCE_TYPE=local runs the job on this machine.
"""

import os
import sys
from pathlib import Path

from sagemaker.pytorch import PyTorch

image, role = sys.argv[1:]
smp_options = {
    "enabled": True,
    "parameters": {
        "partitions": 4,
        "microbatches": 4,
        "placement_strategy": "spread",
        "pipeline": "interleaved",
        "optimize": "speed",
        "ddp": True,
    },
}
# AWS's guide says that this option may fail in its containers, because their toolkit sets it too. In ours it is set
# once.
mpi_options = {
    "enabled": True,
    "processes_per_host": 8,
    "custom_mpi_options": "--mca btl_vader_single_copy_mechanism none",
}
estimator = PyTorch(
    base_job_name="digits-modelparallel",
    entry_point="train_smp.py",
    source_dir=str(Path(__file__).parents[1] / "digits"),
    image_uri=image,
    role=role,
    instance_count=1,
    instance_type=os.environ.get("INSTANCE_TYPE", "ml.p3.16xlarge"),
    hyperparameters={"epochs": 3},
    distribution={"smdistributed": {"modelparallel": smp_options}, "mpi": mpi_options},
)
estimator.fit()
