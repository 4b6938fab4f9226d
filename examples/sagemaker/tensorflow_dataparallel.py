"""Train the digits in TensorFlow on 2 instances, data parallel: `python tensorflow_dataparallel.py IMAGE ROLE`.

SageMaker SDK 2: pip install 'sagemaker<3'. INSTANCE_TYPE=local runs the job on this machine.
"""

import os
import sys
from pathlib import Path

from sagemaker.tensorflow import TensorFlow

image, role = sys.argv[1:]
estimator = TensorFlow(
    base_job_name="digits-tensorflow",
    entry_point="train_tensorflow.py",
    source_dir=str(Path(__file__).parents[1] / "digits"),
    image_uri=image,
    role=role,
    instance_count=2,
    instance_type=os.environ.get("INSTANCE_TYPE", "ml.p3.16xlarge"),
    hyperparameters={"epochs": 3},
    distribution={"smdistributed": {"dataparallel": {"enabled": True}}},
)
estimator.fit()
