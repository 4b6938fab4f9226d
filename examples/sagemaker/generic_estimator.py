"""Train the digits with the generic Estimator, which knows only an image: `python generic_estimator.py IMAGE ROLE`.

SageMaker SDK 2: pip install 'sagemaker<3'. INSTANCE_TYPE=local runs the job on this machine. The class has no
`distribution`, so hyperparameters choose the launcher.
"""

import os
import sys
from pathlib import Path

from sagemaker.estimator import Estimator

image, role = sys.argv[1:]
estimator = Estimator(
    base_job_name="digits-generic",
    entry_point="train.py",
    source_dir=str(Path(__file__).parents[1] / "digits"),
    image_uri=image,
    role=role,
    instance_count=2,
    instance_type=os.environ.get("INSTANCE_TYPE", "ml.p4d.24xlarge"),
    hyperparameters={"epochs": 3, "sagemaker_mpi_enabled": True, "sagemaker_mpi_num_of_processes_per_host": 8},
)
estimator.fit()
