"""Records what the SageMaker SDKs send for the scripts of examples/sagemaker, and for notebooks.

The file is data/sagemaker-requests.json.

    python tests/integration/sagemaker_requests.py [NAME ...]     record these cases, or all; part of `make sagemaker`

The scripts run unmodified, in virtual environments with the real SDKs (.cache/sagemaker-sdk). moto stands in for AWS,
on loopback. A recording has the CreateTrainingJob request, and the names and digests of the uploaded files. The
settings that SDK 3 uploads for its drivers are there with their text.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import logging
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import requests

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "sagemaker"
RECORDINGS = Path(__file__).parent / "data" / "sagemaker-requests.json"
REDIRECT, RUN_NOTEBOOK = (Path(__file__).with_name(name) for name in ("sagemaker_redirect.py", "run_notebook.py"))
ENVIRONMENTS = ROOT / ".cache" / "sagemaker-sdk"
SDKS = {
    "boto3": ("boto3==1.44.5",),
    "1": ("sagemaker==1.72.1", "protobuf<4"),
    "2": ("sagemaker==2.257.7", "ipython==9.18.1"),
    "3": ("sagemaker-train==1.27.0",),
}
IMAGE = "123456789012.dkr.ecr.us-west-2.amazonaws.com/pytorch-training:2.13.0-gpu-py311-cu130-debian12"
ROLE = "arn:aws:iam::123456789012:role/training"
BUCKET = "bucket-of-data"
DRIVER_SETTINGS = ("sourcecode.json", "distributed.json")
"""Files in SDK 3's channel sm_drivers, by which its drivers know the job."""
_TRUST = {"Effect": "Allow", "Principal": {"Service": "sagemaker.amazonaws.com"}, "Action": "sts:AssumeRole"}
_REGION = "us-west-2"


class Case(NamedTuple):
    """A script of examples/sagemaker, or a notebook beside it, and the SDK that runs it."""

    sdk: str
    script: str
    arguments: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return "-".join((Path(self.script).stem, *self.arguments[:1]))

    @property
    def command(self) -> list[str | Path]:
        script = EXAMPLES / self.script
        if script.suffix != ".ipynb":
            return [script, IMAGE, ROLE, *self.arguments]
        return [RUN_NOTEBOOK, script, f"image={IMAGE}", f"role={ROLE}", "instance_type=ml.p4d.24xlarge"]


CASES = (
    Case("boto3", "create_training_job.py", (BUCKET,)),
    Case("2", "generic_estimator.py"),
    Case("2", "tensorflow_modelparallel.py"),
    Case("1", "sdk1_dataparallel.py"),
    Case("1", "sdk1_tensorflow.py"),
    Case("2", "pytorch_dataparallel.py"),
    Case("2", "pytorch_modelparallel.py"),
    Case("2", "tensorflow_dataparallel.py"),
    Case("2", "../notebooks/data_parallel_pytorch.ipynb"),
    Case("2", "../notebooks/data_parallel_tensorflow.ipynb"),
    Case("2", "../notebooks/model_parallel.ipynb"),
    Case("2", "huggingface_finetune.py", (BUCKET,)),
    Case("2", "channels_and_spot.py", (BUCKET, "fs-0123456789abcdef0", "subnet-0123", "sg-0123")),
    *(Case("3", "modeltrainer.py", (kind,)) for kind in ("mpi", "torchrun", "train")),
)


def example_digest(script: str) -> str:
    """Returns the digest of a script of examples/sagemaker: a recording is of the script that is there."""
    return hashlib.sha256((EXAMPLES / script).read_bytes()).hexdigest()


def make_environment(sdk: str) -> Path:
    """Makes the virtual environment of an SDK, unless it is there. Returns its Python."""
    directory = ENVIRONMENTS / sdk
    python, stamp = directory / "bin" / "python", directory / "+".join(SDKS[sdk])
    if not stamp.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", directory], check=True)
        subprocess.run([python, "-m", "pip", "install", "-qq", *SDKS[sdk]], check=True)
        stamp.touch()
    return python


def sdk_variables(**more: str) -> dict[str, str]:
    """Returns the variables with which an SDK runs: credentials of no account, and no configuration of this machine."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "SHOAL_", "SM_"))}
    return {
        **kept,
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_DEFAULT_REGION": _REGION,
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
        "SAGEMAKER_SUPPRESS_V2_WARNING": "1",
        "SAGEMAKER_USER_CONFIG_OVERRIDE": str(RECORDINGS.with_name("sagemaker-config.yaml")),  # no telemetry
        "NO_PROXY": "*",
        **more,
    }


class FakeAws:
    """AWS's services on loopback: moto, with CreateTrainingJob requests kept."""

    def __init__(self) -> None:
        import boto3  # type: ignore[import-untyped]
        from moto.core.exceptions import AccessDeniedError
        from moto.iam.responses import IamResponse
        from moto.sagemaker.responses import SageMakerResponse  # slow to import
        from moto.server import ThreadedMotoServer

        self.requests: list[dict[str, Any]] = []
        original = SageMakerResponse.create_training_job

        def create_training_job(response: SageMakerResponse) -> Any:
            self.requests.append(json.loads(response.body))
            return original(response)

        SageMakerResponse.create_training_job = create_training_job  # type: ignore[method-assign, assignment]
        self._restore = functools.partial(setattr, SageMakerResponse, "create_training_job", original)

        def simulate_principal_policy(_: IamResponse) -> Any:
            """Denies what moto lacks: SDK 3 then checks the role less, and says so."""
            raise AccessDeniedError(ROLE, "iam:SimulatePrincipalPolicy")

        setattr(IamResponse, "simulate_principal_policy", simulate_principal_policy)  # noqa: B010
        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request
        self._server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self._server.start()
        host, port = self._server.get_host_and_port()
        self.endpoint = f"http://{host}:{port}"
        keys = {"aws_access_key_id": "x", "aws_secret_access_key": "x", "region_name": _REGION}
        self._client = functools.partial(boto3.client, endpoint_url=self.endpoint, **keys)
        policy = json.dumps({"Version": "2012-10-17", "Statement": [_TRUST]})
        where: Any = {"LocationConstraint": _REGION}
        self._client("s3").create_bucket(Bucket=BUCKET, CreateBucketConfiguration=where)
        self._client("iam").create_role(RoleName="training", AssumeRolePolicyDocument=policy)

    def uploads(self) -> dict[str, bytes]:
        """Returns the uploaded objects, by their address."""
        s3 = self._client("s3")
        found = {}
        for bucket in s3.list_buckets()["Buckets"]:
            for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket["Name"]):
                for item in page.get("Contents", []):
                    body = s3.get_object(Bucket=bucket["Name"], Key=item["Key"])["Body"].read()
                    found[f"s3://{bucket['Name']}/{item['Key']}"] = body
        return found

    def stop(self) -> None:
        """Ends the server, and forgets all that was made: moto keeps it in this process."""
        requests.post(f"{self.endpoint}/moto-api/reset", timeout=30)
        self._server.stop()
        self._restore()


def record(case: Case) -> dict[str, Any]:
    """Runs a script with its SDK. Returns its recording. Raises if the script sends no job or several."""
    python = make_environment(case.sdk)
    aws = FakeAws()
    try:
        output = _run_until_job([python, REDIRECT, *case.command], aws)
        uploads = aws.uploads()
    finally:
        aws.stop()
    if len(aws.requests) != 1:
        raise RuntimeError(f"{case.name}: {len(aws.requests)} jobs\n{output}")
    (request,) = aws.requests
    job = request["TrainingJobName"]
    recording = {
        "sdk": SDKS[case.sdk][0],
        "script": case.script,
        "script_sha256": example_digest(case.script),
        "request": request,
        "uploads": {
            address: content.decode() if address.endswith(DRIVER_SETTINGS) else _digest(content)
            for address, content in sorted(uploads.items())
            if not _is_bytecode(address)
        },
    }
    recorded: dict[str, Any] = json.loads(json.dumps(recording).replace(job, "JOB").replace(str(ROOT), "CHECKOUT"))
    return recorded


def _run_until_job(command: list[str | Path], aws: FakeAws) -> str:
    """Runs a script until it has sent a job, and stops it then: it would wait for the job. Returns its output."""
    with tempfile.TemporaryFile("w+") as output:
        variables = sdk_variables(AWS_ENDPOINT_URL=aws.endpoint)
        process = subprocess.Popen(command, env=variables, stdout=output, stderr=subprocess.STDOUT)
        while process.poll() is None and not aws.requests:
            time.sleep(0.1)
        process.kill()
        process.wait()
        output.seek(0)
        return output.read()


def _digest(content: bytes) -> str | dict[str, str]:
    """Returns the digest of a file; of an archive the digests of its files, because the archive holds times."""
    if not content.startswith(b"\x1f\x8b"):
        return hashlib.sha256(content).hexdigest()
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        members = [each for each in archive.getmembers() if each.isfile() and not _is_bytecode(each.name)]
        files = [(member.name, archive.extractfile(member)) for member in members]
        return {name: hashlib.sha256(file.read()).hexdigest() for name, file in sorted(files) if file}


def _is_bytecode(path: str) -> bool:
    """Returns whether a file is bytecode: whether one is there depends on the programs that ran before."""
    return "__pycache__" in path.split("/")


def main(names: list[str]) -> int:
    """Records the named cases, or all, and writes the file."""
    for case in CASES:
        if not names or case.name in names:
            print(f"{case.name}: {SDKS[case.sdk][0]}", flush=True)
            recordings = json.loads(RECORDINGS.read_text()) if RECORDINGS.exists() else {}
            recordings[case.name] = record(case)
            RECORDINGS.write_text(json.dumps(dict(sorted(recordings.items())), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
