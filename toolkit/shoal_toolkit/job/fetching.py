"""Fetches the user's code into a directory of this host.

An archive, a single file and an s3:// address are unpacked by a child process (sidecars/unpack.py) into a new
directory. It then becomes <base>/code in one step, so that <base>/code is always complete. If <base>/code is not empty,
or can't be replaced, the new directory stays where it is, and the log says so. (The stock toolkit then runs the files
in <base>/code.)
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence

from shoal_toolkit.errors import WRONG_CONFIGURATION, ContractError, LaunchError
from shoal_toolkit.job.code import Code, CodeSource, inspect_code
from shoal_toolkit.system.process import signal_group, spawn


def fetch_code(source: CodeSource, code_dir: str, environ: Mapping[str, str]) -> Code:
    """Fetches the code to this host, and returns it. Leaves no files behind if it fails.

    Args:
        source: Where the code is.
        code_dir: The directory <base>/code, which the code becomes if it is empty.
        environ: The environment of the child process, with the region for S3.

    Raises:
        ContractError: If the address, or the archive there, is wrong.
        LaunchError: If the address can't be reached, or the disk is full.
    """
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
        raise LaunchError(
            f"No temporary directory for the code can be made: {error}. "
            "Fix: set TMPDIR to a directory that this user can write."
        ) from None


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
