"""Train the digits on 2 instances without the SDK: `python create_training_job.py IMAGE ROLE BUCKET`.

boto3 alone: pip install boto3. The AWS CLI sends the same: `aws sagemaker create-training-job --cli-input-json file://…`.
"""

import io
import json
import sys
import tarfile
import time
from pathlib import Path

import boto3  # type: ignore[import-untyped]

image, role, bucket = sys.argv[1:]
name = f"digits-{time.strftime('%Y%m%d-%H%M%S')}"
code = io.BytesIO()
with tarfile.open(fileobj=code, mode="w:gz") as archive:
    for file in sorted((Path(__file__).parents[1] / "digits").glob("*.py")):
        archive.add(file, file.name)
boto3.client("s3").put_object(Bucket=bucket, Key=f"{name}/sourcedir.tar.gz", Body=code.getvalue())

# The SDK encodes each value as JSON. `train` also accepts plain text.
hyperparameters = {
    "epochs": 3,
    "sagemaker_program": "train.py",
    "sagemaker_submit_directory": f"s3://{bucket}/{name}/sourcedir.tar.gz",
    "sagemaker_mpi_enabled": True,
    "sagemaker_mpi_num_of_processes_per_host": 8,
}
sagemaker = boto3.client("sagemaker")
sagemaker.create_training_job(
    TrainingJobName=name,
    AlgorithmSpecification={"TrainingImage": image, "TrainingInputMode": "File"},
    RoleArn=role,
    HyperParameters={key: json.dumps(value) for key, value in hyperparameters.items()},
    OutputDataConfig={"S3OutputPath": f"s3://{bucket}/output"},
    ResourceConfig={"InstanceType": "ml.p4d.24xlarge", "InstanceCount": 2, "VolumeSizeInGB": 50},
    StoppingCondition={"MaxRuntimeInSeconds": 3600},
)
sagemaker.get_waiter("training_job_completed_or_stopped").wait(TrainingJobName=name)
print(sagemaker.describe_training_job(TrainingJobName=name)["TrainingJobStatus"])
