"""Train the digits in TensorFlow with SageMaker SDK 1.x, data parallel: `python sdk1_tensorflow.py IMAGE ROLE`.

pip install 'sagemaker<2'. This SDK asks for a version and for `script_mode` too. They have no effect on the image.
"""

import os
import sys
from pathlib import Path

from sagemaker.tensorflow import TensorFlow

image, role = sys.argv[1:]
estimator = TensorFlow(
    base_job_name="digits-sdk1-tensorflow",
    entry_point="train_tensorflow.py",
    source_dir=str(Path(__file__).parents[1] / "digits"),
    image_name=image,
    role=role,
    framework_version="2.1.0",
    py_version="py3",
    script_mode=True,
    train_instance_count=2,
    train_instance_type=os.environ.get("INSTANCE_TYPE", "ml.p3.16xlarge"),
    hyperparameters={"epochs": 3, "sagemaker_distributed_dataparallel_enabled": True},
)
estimator.fit()
