"""Train the digits in 2 stages with TensorFlow: `python tensorflow_modelparallel.py IMAGE ROLE`.

SageMaker SDK 2: pip install 'sagemaker<3'. INSTANCE_TYPE=local runs the job on this machine. The image is one of
TensorFlow 2.14.
"""

import os
import sys
from pathlib import Path

from sagemaker.tensorflow import TensorFlow

image, role = sys.argv[1:]
smp_options = {"enabled": True, "parameters": {"partitions": 2, "microbatches": 4}}
estimator = TensorFlow(
    base_job_name="digits-modelparallel",
    entry_point="train_smp_tensorflow.py",
    source_dir=str(Path(__file__).parents[1] / "digits"),
    image_uri=image,
    role=role,
    instance_count=1,
    instance_type=os.environ.get("INSTANCE_TYPE", "ml.g5.12xlarge"),
    hyperparameters={"epochs": 3},
    model_dir=False,  # the script takes no --model_dir
    distribution={
        "smdistributed": {"modelparallel": smp_options},
        "mpi": {"enabled": True, "processes_per_host": 4},
    },
)
estimator.fit()
