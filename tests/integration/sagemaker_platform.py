"""Does what SageMaker does with a CreateTrainingJob request: the files under /opt/ml, the command and the environment.

https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-training-algo-running-container.html
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write_configuration(root: Path, request: Mapping[str, Any], hosts: Sequence[str], current_host: str) -> None:
    """Writes input/config of one host, and makes the directories that SageMaker makes."""
    config = root / "input" / "config"
    for directory in (config, root / "input" / "data", root / "model", root / "output" / "data"):
        directory.mkdir(parents=True, exist_ok=True)
    instance_type = request["ResourceConfig"]["InstanceType"]
    group = "homogeneousCluster"
    files = {
        "hyperparameters": request.get("HyperParameters") or {},
        "inputdataconfig": {
            channel["ChannelName"]: _describe_channel(channel, request)
            for channel in request.get("InputDataConfig") or []
        },
        "resourceconfig": {
            "current_host": current_host,
            "current_instance_type": instance_type,
            "current_group_name": group,
            "hosts": list(hosts),
            "instance_groups": [
                {"instance_group_name": group, "instance_type": instance_type, "hosts": list(hosts)},
            ],
            "network_interface_name": "eth0",
        },
    }
    for name, content in files.items():
        (config / f"{name}.json").write_text(json.dumps(content))


def _describe_channel(channel: Mapping[str, Any], request: Mapping[str, Any]) -> dict[str, str]:
    mode = channel.get("InputMode") or request["AlgorithmSpecification"]["TrainingInputMode"]
    source = channel["DataSource"].get("S3DataSource", {})
    distribution = (
        {"S3DistributionType": source["S3DataDistributionType"]} if "S3DataDistributionType" in source else {}
    )
    return {"TrainingInputMode": mode, "RecordWrapperType": "None", **distribution}


def build_environment(request: Mapping[str, Any]) -> dict[str, str]:
    """Returns the variables of a container."""
    return {
        **(request.get("Environment") or {}),
        "TRAINING_JOB_NAME": request["TrainingJobName"],
        "TRAINING_JOB_ARN": f"arn:aws:sagemaker:us-west-2:123456789012:training-job/{request['TrainingJobName']}",
        "AWS_REGION": "us-west-2",
    }


def build_command(request: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entry point and the command of a container: `train`, unless the request has its own."""
    algorithm = request["AlgorithmSpecification"]
    entrypoint, arguments = (algorithm.get(f"Container{name}") for name in ("Entrypoint", "Arguments"))
    if entrypoint:
        return {"entrypoint": entrypoint, "command": arguments}
    return {"command": arguments or "train"}
