"""Downloads from S3 and uploads to it with boto3. Only helper processes import this: boto3 takes 40 MB and 0.2 s.

Endpoint: AWS_ENDPOINT_URL_S3, else S3_ENDPOINT_URL, else AWS_ENDPOINT_URL. Region: SAGEMAKER_REGION (`train` copies the
hyperparameter sagemaker_region to it), else AWS_REGION, else boto3's own search. Credentials: boto3's own search.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, BinaryIO

from shoal_toolkit.errors import ContractError, LaunchError, TrainError

_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "S3_ENDPOINT_URL", "AWS_ENDPOINT_URL")
_REGIONS = ("SAGEMAKER_REGION", "AWS_REGION")
_MISSING = ("404", "NoSuchKey", "NoSuchBucket")


def split_address(address: str) -> tuple[str, str]:
    """Returns bucket and key of an s3:// address.

    >>> split_address("s3://bucket/a/b.tar.gz")
    ('bucket', 'a/b.tar.gz')
    """
    bucket, _, key = address.partition("://")[2].partition("/")
    return bucket, key


def make_s3_client(environ: Mapping[str, str]) -> Any:
    """Returns a client of S3, with region and endpoint from `environ`. boto3 finds credentials by itself.

    Raises LaunchError if boto3 is not installed.
    """
    return make_client("s3", _first_set(environ, _REGIONS), _first_set(environ, _ENDPOINTS))


def make_client(service: str, region: str | None, endpoint: str | None = None) -> Any:
    """Returns a client of an AWS service that fails after minutes, not hours.

    Args:
        service: Such as "s3".
        region: None for boto3's own search.
        endpoint: The URL; None for the one of AWS.

    Raises:
        LaunchError: If boto3 is not installed.
    """
    try:
        import boto3  # type: ignore[import-untyped]
        from botocore.config import Config  # type: ignore[import-untyped]
    except ImportError as error:
        raise LaunchError(
            f"The package boto3, which is needed for AWS, is not installed ({error}). Fix: pip install boto3"
        ) from None
    config = Config(connect_timeout=10, read_timeout=60, retries={"mode": "standard", "total_max_attempts": 4})
    return boto3.client(service, region_name=region, endpoint_url=endpoint, config=config)


def download(address: str, path: str, environ: Mapping[str, str]) -> None:
    """Downloads an object to a file.

    Args:
        address: Such as s3://bucket/key.
        environ: The environment, with endpoint and region.

    Raises:
        TrainError: If it does not exist, or S3 refuses or does not answer.
    """
    bucket, key = split_address(address)
    s3 = make_s3_client(environ)
    try:
        s3.download_file(bucket, key, path)
    except Exception as error:  # boto3's errors have no common base
        raise explain_error(address, error) from None


def upload(client: Any, file: BinaryIO, address: str) -> None:
    """Uploads a file in this thread. If reading it fails, the upload ends and makes no object.

    Errors of boto3 are raised unchanged: see `explain_error`.

    Args:
        address: Such as s3://bucket/key.
    """
    from boto3.s3.transfer import TransferConfig  # type: ignore[import-untyped]

    bucket, key = split_address(address)
    client.upload_fileobj(file, bucket, key, Config=TransferConfig(use_threads=False))


def explain_error(address: str, error: Exception) -> TrainError:
    """Returns, not raises, an error of boto3 as a ContractError if S3 refuses, or a LaunchError if it can't be reached.

    A wrong address gives a ContractError. A TrainError is returned as it is.
    """
    if isinstance(error, TrainError):
        return error
    answer = getattr(error, "response", {}).get("Error", {})
    code = str(answer.get("Code", ""))
    if code in _MISSING:
        return ContractError(f"{address} does not exist. Fix: check the bucket and the key.")
    if code:
        reason = answer.get("Message") or "no reason given"
        return ContractError(
            f"{address}: S3 refuses with {code} ({reason}). Fix: check that the job's role, or the credentials in its "
            "variables, allow it."
        )
    if isinstance(error, ValueError):
        return ContractError(f"{address} is not a valid address: {type(error).__name__}: {error}. Fix: correct it.")
    return LaunchError(
        f"{address} cannot be reached: {type(error).__name__}: {error}. Fix: check the network and the region."
    )


def _first_set(environ: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((value for name in names if (value := environ.get(name))), None)
