"""Reads from and writes to S3 with boto3, in processes beside the launcher: in it, boto3 would cost 40 MB and 0.2 s.

Endpoint: AWS_ENDPOINT_URL_S3, else S3_ENDPOINT_URL, else AWS_ENDPOINT_URL. Region: SAGEMAKER_REGION (the launcher puts
the hyperparameter sagemaker_region there), else AWS_REGION, else what boto3 finds itself. So for credentials.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, BinaryIO

from shoal_toolkit.errors import ContractError, LaunchError, TrainError

_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "S3_ENDPOINT_URL", "AWS_ENDPOINT_URL")
_REGIONS = ("SAGEMAKER_REGION", "AWS_REGION")
_MISSING = ("404", "NoSuchKey", "NoSuchBucket")


def split(address: str) -> tuple[str, str]:
    """Return bucket and key of an s3:// address.

    >>> split("s3://bucket/a/b.tar.gz")
    ('bucket', 'a/b.tar.gz')
    """
    bucket, _, key = address.partition("://")[2].partition("/")
    return bucket, key


def client(environ: Mapping[str, str]) -> Any:
    """Return a client of S3. Raises LaunchError where boto3 is missing."""
    return boto("s3", _first(environ, _REGIONS), _first(environ, _ENDPOINTS))


def boto(service: str, region: str | None, endpoint: str | None = None) -> Any:
    """Return a client of one of AWS's services, which gives up after minutes and not hours."""
    try:
        import boto3  # type: ignore[import-untyped]
        from botocore.config import Config  # type: ignore[import-untyped]
    except ImportError as error:
        raise LaunchError(
            f"boto3, which speaks to AWS, is not installed ({error}): pip install 'shoal-toolkit[s3]'"
        ) from None
    config = Config(connect_timeout=10, read_timeout=60, retries={"mode": "standard", "total_max_attempts": 4})
    return boto3.client(service, region_name=region, endpoint_url=endpoint, config=config)


def download(address: str, path: str, environ: Mapping[str, str]) -> None:
    """Write an object to a file. Raises TrainError with the address, and no secret."""
    bucket, key = split(address)
    s3 = client(environ)
    try:
        s3.download_file(bucket, key, path)
    except Exception as error:  # boto3's errors have no common base
        raise explained(address, error) from None


def upload(client: Any, file: BinaryIO, address: str) -> None:
    """Write a file to an object, in this thread: an error while it is read ends the upload, and no object is made."""
    from boto3.s3.transfer import TransferConfig  # type: ignore[import-untyped]

    bucket, key = split(address)
    client.upload_fileobj(file, bucket, key, Config=TransferConfig(use_threads=False))


def explained(address: str, error: Exception) -> TrainError:
    """Return what boto3 says as an error of ours: S3's refusal is a matter of the configuration."""
    if isinstance(error, TrainError):
        return error
    answer = getattr(error, "response", {}).get("Error", {})
    code = str(answer.get("Code", ""))
    if code in _MISSING:
        return ContractError(f"{address} does not exist. Check the bucket and the key.")
    if code:
        said = answer.get("Message") or "no reason given"
        return ContractError(
            f"{address}: S3 refuses with {code} ({said}). Check that the job's role, or the credentials in its "
            "variables, may use it."
        )
    if isinstance(error, ValueError):
        return ContractError(f"{address} cannot be asked for: {type(error).__name__}: {error}")
    return LaunchError(f"{address} cannot be reached: {type(error).__name__}: {error}")


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((value for name in names if (value := environ.get(name))), None)
