"""Where the user's code comes from, and how it gets into a directory of this host.

SAGEMAKER_SUBMIT_DIRECTORY beats the hyperparameter sagemaker_submit_directory, which beats <base>/code. A directory is
used where it is. An archive, a single file and an s3:// address are unpacked by a child process (unpack.py) into a new
directory, which then becomes <base>/code in one step: what is there is always whole. Where <base>/code holds something
already, or cannot be replaced, the new directory stays where it was made, and that is said. (The stock toolkit then
runs what lies in <base>/code, whatever it is.)
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence

from shoal_toolkit.errors import ContractError, LaunchError
from shoal_toolkit.light_typing import Any, NamedTuple
from shoal_toolkit.system.process import signal_group, spawn

S3 = "s3://"
_ALLOWED = "Allowed are a directory, a .tar.gz archive or one file in this container, and s3://bucket/key."


class Source(NamedTuple):
    """A place of code, and who named it: a variable or a hyperparameter, nobody for <base>/code."""

    address: str
    named_by: str

    @property
    def in_place(self) -> bool:
        """Whether the code is used where it is."""
        return not self.named_by or (not self.address.startswith(S3) and os.path.isdir(self.address))


class Code(NamedTuple):
    """The user's code on this host, and what kind of tree it is."""

    directory: str
    requirements: bool = False  # it has a requirements.txt that asks for something
    setup_py: bool = False
    package: bool = False  # pip can install it
    fetched: bool = True  # False in `train --explain`: it would be fetched, and has not been looked at
    origin: str = ""  # where it was fetched from; empty for a directory that is used in place
    note: str = ""


def locate(environ: Mapping[str, str], toolkit: Mapping[str, Any], code_dir: str) -> Source:
    """Return where the code is. Raises ContractError for a place that cannot hold any."""
    variable = environ.get("SAGEMAKER_SUBMIT_DIRECTORY")
    value = variable or toolkit.get("sagemaker_submit_directory")
    if not value:
        return Source(code_dir, "")
    name = "SAGEMAKER_SUBMIT_DIRECTORY" if variable else "sagemaker_submit_directory"
    address = str(value).removeprefix("file://")
    if address.startswith(S3):
        if not re.fullmatch(r"s3://[^/]+/(.*[^/])", address):
            raise ContractError(f"{name} is {value!r}, which does not name an object. {_ALLOWED}")
        return Source(address, name)
    if "://" in address:
        raise ContractError(f"{name} is {value!r}, which is no place that code is fetched from. {_ALLOWED}")
    if os.path.abspath(address) == code_dir:  # the SDK's local mode says so, whatever is there
        return Source(code_dir, "")
    if not os.path.isdir(address) and not os.path.isfile(address):
        raise ContractError(f"{name} is {value!r}, which does not exist in this container. {_ALLOWED}")
    return Source(os.path.abspath(address), name)


def foresee(source: Source, code_dir: str) -> Code:
    """Return what is known of the code without fetching it."""
    if source.in_place:
        return look(source.address)
    note = f"the code will be fetched from {source.address} ({source.named_by}); here it has not been looked at"
    return Code(code_dir, fetched=False, origin=source.address, note=note)


def fetch(source: Source, code_dir: str, environ: Mapping[str, str]) -> Code:
    """Bring the code to this host. Raises ContractError or LaunchError with the address, and then leaves nothing."""
    if source.in_place:
        return look(source.address)
    stage, why = _make_stage(code_dir)
    try:
        _run([sys.executable, "-m", "shoal_toolkit.sidecars.unpack", source.address, stage], environ, source)
    except BaseException:
        import shutil

        shutil.rmtree(stage, ignore_errors=True)
        raise
    directory, why = (os.path.join(stage, "code"), why) if why else _settle(stage, code_dir)
    note = f"the code is from {source.address} ({source.named_by}), in {directory}"
    return look(directory)._replace(origin=source.address, note=f"{note}: {why}" if why else note)


def look(directory: str) -> Code:
    """Return what kind of tree a directory is."""
    setup_py = os.path.isfile(os.path.join(directory, "setup.py"))
    # Many a pyproject.toml only configures tools.
    package = setup_py or _has_line(directory, "pyproject.toml", r"\[(project|build-system)\]")
    return Code(directory, _has_line(directory, "requirements.txt", r"[^\s#]"), setup_py, package)


def make_directory(code: Code) -> None:
    """Make the code directory for a job that needs none, such as one that runs an installed module."""
    try:
        os.makedirs(code.directory, exist_ok=True)
    except OSError as error:
        raise ContractError(f"The code directory {code.directory} cannot be made: {error.strerror}.") from None


def _has_line(directory: str, name: str, beginning: str) -> bool:
    """Whether there is a file of that name with a line that begins so."""
    path = os.path.join(directory, name)
    if not os.path.isfile(path):
        return False
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return any(re.match(beginning, line.strip()) for line in file)
    except OSError as error:
        raise ContractError(f"{path} cannot be read: {error.strerror}.") from None


def _make_stage(code_dir: str) -> tuple[str, str]:
    """Make a new directory: beside the code directory, or else among the temporary files, and why."""
    if os.path.isdir(code_dir) and os.listdir(code_dir):
        return _temporary(), f"{code_dir} is not empty"
    stage = f"{code_dir}-{os.urandom(4).hex()}"
    try:
        os.makedirs(stage)
    except OSError as error:  # read-only, or another user's
        return _temporary(), f"{stage} cannot be made ({error.strerror})"
    return stage, ""


def _temporary() -> str:
    import tempfile

    try:
        return tempfile.mkdtemp(prefix="shoal-code-")
    except OSError as error:
        raise LaunchError(f"There is no place for the code: {error}.") from None


def _settle(stage: str, code_dir: str) -> tuple[str, str]:
    """Let what was unpacked become the code directory. Returns where it is, and why it is elsewhere."""
    unpacked = os.path.join(stage, "code")
    try:
        os.rename(unpacked, code_dir)  # replaces an empty directory, and nothing else
        os.rmdir(stage)
    except OSError as error:
        return unpacked, f"{code_dir} cannot be replaced ({error.strerror})"
    return code_dir, ""


def _run(argv: Sequence[str], environ: Mapping[str, str], source: Source) -> None:
    """Run the child to its end; an exception (a signal that stops the job) ends it at once."""
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
        _end(pid)
        raise
    finally:
        os.close(read_end)
    if code:
        text = message.decode("utf-8", "replace") or f"{source.address} cannot be fetched: exit code {code}."
        raise (ContractError if code == ContractError.exit_code else LaunchError)(f"{source.named_by}: {text}")


def _end(pid: int) -> None:
    signal_group(pid, signal.SIGKILL)
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        return  # it had ended, and was waited for
