"""Train the digits on 2 instances with the data parallel library: `python pytorch_dataparallel.py IMAGE ROLE`.

SageMaker SDK 2: pip install 'sagemaker<3'. INSTANCE_TYPE=local runs the job on this machine.
"""

import os
import sys
from pathlib import Path

from sagemaker.pytorch import PyTorch

image, role = sys.argv[1:]
estimator = PyTorch(
    base_job_name="digits-dataparallel",
    entry_point="train.py",
    source_dir=str(Path(__file__).parents[1] / "digits"),
    image_uri=image,
    role=role,
    instance_count=2,
    instance_type=os.environ.get("INSTANCE_TYPE", "ml.p4d.24xlarge"),
    hyperparameters={"epochs": 3},
    distribution={
        "smdistributed": {
            "dataparallel": {"enabled": True, "custom_mpi_options": "-verbose -x NCCL_DEBUG=VERSION"},
        }
    },
    metric_definitions=[{"Name": "loss", "Regex": "loss ([0-9.]+)"}],
)
estimator.fit()
