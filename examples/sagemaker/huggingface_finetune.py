"""Fine-tune DistilBERT on 2 instances, data parallel: `python huggingface_finetune.py IMAGE ROLE BUCKET`.

The bucket has reviews/train.jsonl and reviews/test.jsonl. SageMaker SDK 2: pip install 'sagemaker<3'.
INSTANCE_TYPE=local runs the job on this machine.
"""

import os
import sys
from pathlib import Path

from sagemaker.huggingface import HuggingFace

image, role, bucket = sys.argv[1:]
estimator = HuggingFace(
    base_job_name="transformer",
    entry_point="train.py",
    source_dir=str(Path(__file__).parents[1] / "transformer"),
    image_uri=image,
    role=role,
    py_version="py311",
    instance_count=2,
    instance_type=os.environ.get("INSTANCE_TYPE", "ml.p4d.24xlarge"),
    hyperparameters={"model": "distilbert-base-uncased", "epochs": 3},
    distribution={"smdistributed": {"dataparallel": {"enabled": True}}},
    metric_definitions=[{"Name": "accuracy", "Regex": "test accuracy ([0-9.]+)"}],
)
estimator.fit({"training": f"s3://{bucket}/reviews"})
