"""Finds the user's code, and fetches it into a directory of this host.

SAGEMAKER_SUBMIT_DIRECTORY beats the hyperparameter sagemaker_submit_directory, which beats <base>/code. A directory is
used in place. An archive, a single file and an s3:// address are unpacked by a child process (sidecars/unpack.py) into
a new directory. It then becomes <base>/code in one step, so that <base>/code is always complete. If <base>/code is not
empty, or can't be replaced, the new directory stays where it is, and the log says so. (The stock toolkit then runs
the files in <base>/code.)
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shoal_toolkit.errors import WRONG_CONFIGURATION, ContractError, LaunchError
from shoal_toolkit.system.process import signal_group, spawn

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


def fetch_code(source: CodeSource, code_dir: str, environ: Mapping[str, str]) -> Code:
    """Fetches the code to this host, unless it is used in place, and returns it. Leaves no files behind if it fails.

    Args:
        source: Where the code is.
        code_dir: The directory <base>/code, which the code becomes if it is empty.
        environ: The environment of the child process, with the region for S3.

    Raises:
        ContractError: If the address, or the archive there, is wrong.
        LaunchError: If the address can't be reached, or the disk is full.
    """
    if source.in_place:
        return inspect_code(source.address)
    stage, why = _make_staging_directory(code_dir)
    try:
        _run_unpack([sys.executable, "-m", "shoal_toolkit.sidecars.unpack", source.address, stage], environ, source)
    except BaseException:
        import shutil

        shutil.rmtree(stage, ignore_errors=True)
        raise
    directory, why = (os.path.join(stage, "code"), why) if why else _move_into_place(stage, code_dir)
    note = f"the code is from {source.address} ({source.named_by}), in {directory}"
    return inspect_code(directory)._replace(origin=source.address, note=f"{note}: {why}" if why else note)


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


def _make_staging_directory(code_dir: str) -> tuple[str, str]:
    """Returns a directory next to the code directory, or a temporary one and the reason for it."""
    if os.path.isdir(code_dir) and os.listdir(code_dir):
        return _make_temporary_directory(), f"{code_dir} is not empty"
    stage = f"{code_dir}-{os.urandom(4).hex()}"
    try:
        os.makedirs(stage)
    except OSError as error:  # read-only, or another user's
        return _make_temporary_directory(), f"{stage} cannot be made ({error.strerror})"
    return stage, ""


def _make_temporary_directory() -> str:
    """Makes a temporary directory for code, which stays after this process. Raises LaunchError if that fails."""
    import tempfile

    try:
        return tempfile.mkdtemp(prefix="shoal-code-")
    except OSError as error:
        raise LaunchError(f"No temporary directory for the code can be made: {error}.") from None


def _move_into_place(stage: str, code_dir: str) -> tuple[str, str]:
    """Removes the staging directory. Returns where the code is, and why it is elsewhere."""
    unpacked = os.path.join(stage, "code")
    try:
        os.rename(unpacked, code_dir)  # replaces an empty directory only
        os.rmdir(stage)
    except OSError as error:
        return unpacked, f"{code_dir} cannot be replaced ({error.strerror})"
    return code_dir, ""


def _wait_for(pid: int) -> None:
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        return  # it had ended, and was waited for


def _run_unpack(argv: Sequence[str], environ: Mapping[str, str], source: CodeSource) -> None:
    """Runs the child to its end. An exception (a signal that stops the job) kills it. Raises the child's error."""
    read_end, write_end = os.pipe()
    try:
        pid = spawn(argv, environ, "/", stdout=write_end)
    finally:
        os.close(write_end)
    message = b""
    try:
        while chunk := os.read(read_end, 65536):
            message += chunk
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except BaseException:
        signal_group(pid, signal.SIGKILL)
        _wait_for(pid)
        raise
    finally:
        os.close(read_end)
    if code:
        text = message.decode("utf-8", "replace") or f"{source.address} cannot be fetched: exit code {code}."
        raise (ContractError if code == WRONG_CONFIGURATION else LaunchError)(f"{source.named_by}: {text}")
