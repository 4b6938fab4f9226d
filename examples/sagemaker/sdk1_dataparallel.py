"""Train the digits with SageMaker SDK 1.x, data parallel: `python sdk1_dataparallel.py IMAGE ROLE`.

pip install 'sagemaker<2'. This SDK has no `distribution` for the library: a hyperparameter selects it.
"""

import os
import sys
from pathlib import Path

from sagemaker.pytorch import PyTorch

image, role = sys.argv[1:]
estimator = PyTorch(
    base_job_name="digits-sdk1",
    entry_point="train.py",
    source_dir=str(Path(__file__).parents[1] / "digits"),
    image_name=image,
    role=role,
    train_instance_count=2,
    train_instance_type=os.environ.get("INSTANCE_TYPE", "ml.p3.16xlarge"),
    hyperparameters={"epochs": 3, "sagemaker_distributed_dataparallel_enabled": True},
)
estimator.fit()
