"""Train on spot instances, with data from S3, from S3 through a pipe, and from FSx for Lustre.

python channels_and_spot.py IMAGE ROLE BUCKET FILE_SYSTEM SUBNET SECURITY_GROUP, with SageMaker SDK 2.
"""

import sys
from pathlib import Path

from sagemaker.inputs import FileSystemInput, TrainingInput
from sagemaker.pytorch import PyTorch

image, role, bucket, file_system, subnet, security_group = sys.argv[1:]
estimator = PyTorch(
    base_job_name="digits-channels",
    entry_point="train_torch.py",
    source_dir=str(Path(__file__).parents[1] / "digits"),
    image_uri=image,
    role=role,
    instance_count=1,
    instance_type="ml.g5.xlarge",
    hyperparameters={"epochs": 3, "checkpoint-dir": "/opt/ml/checkpoints"},
    distribution={"torch_distributed": {"enabled": True}},
    # A spot interruption stops the job. SageMaker restarts it with the checkpoints, and the script goes on from there.
    use_spot_instances=True,
    max_run=3600,
    max_wait=7200,
    checkpoint_s3_uri=f"s3://{bucket}/checkpoints/digits",
    # FSx for Lustre and EFS are in a VPC.
    subnets=[subnet],
    security_group_ids=[security_group],
)
estimator.fit(
    {
        "training": FileSystemInput(file_system, "FSxLustre", "/fsx/digits", file_system_access_mode="ro"),
        "validation": TrainingInput(f"s3://{bucket}/digits/"),
        "stream": TrainingInput(f"s3://{bucket}/records/", input_mode="Pipe"),
    }
)
