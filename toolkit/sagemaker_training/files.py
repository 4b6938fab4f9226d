"""Reads and writes files, and the failure file of the job."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sagemaker_training._absent import refuse_others


def read_file(path: str, mode: str = "r") -> Any:
    """Returns the content of a file: text, or bytes with the mode "rb"."""
    with open(path, mode) as file:
        return file.read()


def write_file(path: str, data: Any, mode: str = "w") -> None:
    """Writes text to a file, or bytes with the mode "wb"."""
    with open(path, mode) as file:
        file.write(data)


def read_json(path: str) -> Any:
    """Returns the content of a JSON file."""
    with open(path, encoding="utf-8") as file:
        return json.load(file)


@contextmanager
def tmpdir(suffix: str = "", prefix: str = "tmp", directory: str | None = None) -> Iterator[str]:
    """Yields a new directory, and removes it at the end, also after an error."""
    with tempfile.TemporaryDirectory(suffix, prefix, directory) as path:
        yield path


def write_failure_file(failure_msg: str) -> None:
    """Writes the job's failure file, unless there is one. `train` keeps its text if the script then fails."""
    from shoal_toolkit.job.contract import read_paths

    path = os.path.join(read_paths(dict(os.environ)).output, "failure")
    if not os.path.exists(path):
        write_file(path, failure_msg)


__getattr__ = refuse_others(
    __name__,
    (),
    {
        "write_success_file": "nothing: `train` writes the file if the job succeeds",
        "download_and_extract": "the hyperparameter sagemaker_submit_directory, with which `train` fetches the code",
        "s3_download": 'boto3: boto3.client("s3").download_file(bucket, key, path)',
    },
    "the module os, shutil or tarfile",
)
