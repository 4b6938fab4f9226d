"""Finds the user's code: SAGEMAKER_SUBMIT_DIRECTORY, else sagemaker_submit_directory, else <base>/code.

A directory is used in place. Everything else is fetched (job/fetching.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from shoal_toolkit.errors import ContractError

S3 = "s3://"
_ALLOWED = "Allowed are a directory, a .tar.gz archive or one file in this container, and s3://bucket/key."


class CodeSource(NamedTuple):
    """Where the code is, and which variable or hyperparameter says so; empty for <base>/code."""

    address: str
    named_by: str

    @property
    def in_place(self) -> bool:
        """Whether the code is a directory that is used in place."""
        return not self.named_by or (not self.address.startswith(S3) and os.path.isdir(self.address))


class Code(NamedTuple):
    """The user's code on this host."""

    directory: str
    requirements: bool = False  # it has a requirements.txt that is not empty
    setup_py: bool = False
    package: bool = False  # pip can install it
    fetched: bool = True  # False in `train --explain` if it would have to be fetched
    origin: str = ""  # the address it was fetched from; empty for a directory that is used in place
    note: str = ""  # for the log


def locate_code(environ: Mapping[str, str], toolkit: Mapping[str, Any], code_dir: str) -> CodeSource:
    """Returns where the code is: SAGEMAKER_SUBMIT_DIRECTORY, else sagemaker_submit_directory, else `code_dir`.

    Args:
        environ: The environment of `train`.
        toolkit: The hyperparameters for the toolkit itself.
        code_dir: The directory <base>/code.

    Raises:
        ContractError: If the address is of an unsupported kind, or nothing exists there.
    """
    variable = environ.get("SAGEMAKER_SUBMIT_DIRECTORY")
    value = variable or toolkit.get("sagemaker_submit_directory")
    if not value:
        return CodeSource(code_dir, "")
    name = "SAGEMAKER_SUBMIT_DIRECTORY" if variable else "sagemaker_submit_directory"
    address = str(value).removeprefix("file://")
    if address.startswith(S3):
        if not re.fullmatch(r"s3://[^/]+/(.*[^/])", address):
            raise ContractError(f"{name} is {value!r}, which does not name an object. {_ALLOWED}")
        return CodeSource(address, name)
    if "://" in address:
        raise ContractError(f"{name} is {value!r}, which is not a supported code location. {_ALLOWED}")
    if os.path.abspath(address) == code_dir:  # the SDK's local mode always sets this
        return CodeSource(code_dir, "")
    if not os.path.isdir(address) and not os.path.isfile(address):
        raise ContractError(f"{name} is {value!r}, which does not exist in this container. {_ALLOWED}")
    return CodeSource(os.path.abspath(address), name)


def describe_without_fetching(source: CodeSource, code_dir: str) -> Code:
    """Returns the known facts about code before it is fetched, for `train --explain`. Code used in place is inspected.

    Args:
        source: Where the code is.
        code_dir: The directory into which it would be fetched.
    """
    if source.in_place:
        return inspect_code(source.address)
    note = f"the code will be fetched from {source.address} ({source.named_by}); --explain does not fetch it"
    return Code(code_dir, fetched=False, origin=source.address, note=note)


def inspect_code(directory: str) -> Code:
    """Returns facts about the code in a directory: requirements, a setup.py, or a package that pip can install.

    Raises ContractError if a file there can't be read.
    """
    setup_py = os.path.isfile(os.path.join(directory, "setup.py"))
    # A pyproject.toml that only configures tools makes no package.
    package = setup_py or _has_line(directory, "pyproject.toml", r"\[(project|build-system)\]")
    return Code(directory, _has_line(directory, "requirements.txt", r"[^\s#]"), setup_py, package)


def make_code_directory(code: Code) -> None:
    """Makes the code directory for a job without code, such as one that runs an installed module.

    Raises:
        ContractError: If it can't be made.
    """
    try:
        os.makedirs(code.directory, exist_ok=True)
    except OSError as error:
        raise ContractError(f"The code directory {code.directory} cannot be made: {error.strerror}.") from None


def _has_line(directory: str, name: str, pattern: str) -> bool:
    """Whether a file of that name exists and has a line that matches at its beginning."""
    path = os.path.join(directory, name)
    if not os.path.isfile(path):
        return False
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return any(re.match(pattern, line.strip()) for line in file)
    except OSError as error:
        raise ContractError(f"{path} cannot be read: {error.strerror}.") from None
