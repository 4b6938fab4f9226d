"""Writes the result of a job: output/failure or success, job.json, and the exit code. No other module does.

Before the job, it makes the output directories, and removes the result of an earlier job.
"""

from __future__ import annotations

import json
import os
import signal
import stat
from collections.abc import Mapping, Sequence

from shoal_toolkit import redact
from shoal_toolkit.errors import FAILED, LaunchError, TrainError
from shoal_toolkit.fast_typing import Any, NamedTuple
from shoal_toolkit.job.contract import Paths
from shoal_toolkit.log import write_log

FAILURE, SUCCESS, REPORT, METRICS = "failure", "success", "job.json", "metrics.jsonl"
_MAX_SCRIPT_FAILURE = 1 << 16  # characters


class Result(NamedTuple):
    """How a job ended."""

    exit_code: int
    message: str = ""  # the text of the failure file; empty for a success

    @classmethod
    def from_error(cls, error: TrainError) -> Result:
        """Returns the result of a job that was not started, or was lost."""
        return cls(error.exit_code, str(error))

    @classmethod
    def from_signal(cls, number: int) -> Result:
        """Returns the result of a job that a signal stopped."""
        name = signal.Signals(number).name
        return cls(
            128 + number, f"The job was stopped: `train` received {name} (spot interruption, StopTrainingJob, ...)."
        )


class Failure(NamedTuple):
    """What is known about a rank, or a launcher, that failed."""

    exit_code: int
    where: str  # such as "rank 1 on algo-2", or "mpirun"
    command: Sequence[str]
    stderr: str  # its end
    facts: Mapping[str, int] = {}  # about its host: see system/failure_facts.py
    launcher: bool = False  # a launcher failed, not a rank
    reason: str = ""  # given if stderr is not to be searched for it


def describe_exit_code(code: int) -> str:
    """Returns an exit code in words.

    >>> describe_exit_code(137)
    'was killed by signal 9 (SIGKILL)'
    """
    number = code - 128
    if number in signal.Signals.__members__.values():
        return f"was killed by signal {number} ({signal.Signals(number).name})"
    return f"exited with code {code}"


def prepare_output(paths: Paths, report: Mapping[str, Any]) -> None:
    """Makes the output directories, removes the result of an earlier job, and writes the first job.json.

    An output directory that can't be written is an error now, and not only after the training.

    Args:
        paths: The directories of the job.
        report: The content of job.json.

    Raises:
        LaunchError: If the directories can't be written.
    """
    try:
        for directory in (paths.model, os.path.join(paths.output, "data")):  # a bare `docker run` has none
            os.makedirs(directory, exist_ok=True)
        for name in (FAILURE, SUCCESS, METRICS):
            _remove_file(paths, name)
        _write_file(paths, REPORT, _format_report(report))
    except OSError as error:
        raise LaunchError(
            f"The output directory cannot be written: {error}. This process (uid {os.getuid()}) must be able to write "
            f"into {paths.output} and {paths.model}. Fix: mount writable directories there."
        ) from None


def read_script_failure(paths: Paths) -> str:
    """Returns the text that the script itself wrote to the failure file; usually empty, also if it can't be read.

    Source: "How Amazon SageMaker AI processes training output" in AWS's developer guide.
    """
    try:
        file = os.open(os.path.join(paths.output, FAILURE), os.O_RDONLY | os.O_NONBLOCK)  # it may be a pipe
        with open(file, encoding="utf-8", errors="replace") as opened:
            return opened.read(_MAX_SCRIPT_FAILURE).strip() if stat.S_ISREG(os.fstat(file).st_mode) else ""
    except OSError:
        return ""


def remove_script_failure(paths: Paths) -> None:
    """Removes the failure file that the script wrote before a restart. An error is ignored: the next end reports it."""
    try:
        _remove_file(paths, FAILURE)
    except OSError:
        return


def write_result(paths: Paths, result: Result, report: Mapping[str, Any]) -> int:
    """Writes job.json, and the file `success` or `failure`. Removes the other one, and logs a failure.

    Secrets are masked. If a file can't be written, the failure file alone is tried, without job.json: the disk may be
    full.

    Args:
        paths: The directories of the job.
        result: How the job ended.
        report: The content of job.json, without the exit code.

    Returns:
        The exit code of `train`; never 0 if a file can't be written.
    """
    code = clamp_exit_code(result.exit_code)
    message = redact.mask_text(result.message)
    if code:
        summary = message.partition("\n\n")[0]  # the traceback is in the log already
        write_log(f"the job failed with exit code {code}: {summary}")
    full_report = _format_report({**report, "exit_code": code})
    files = {FAILURE: message, REPORT: full_report} if code else {REPORT: full_report, SUCCESS: ""}
    try:
        os.makedirs(paths.output, exist_ok=True)
        _remove_file(paths, SUCCESS if code else FAILURE)  # of an earlier job, if this one failed before removing it
        for name, text in files.items():
            _write_file(paths, name, text)
    except OSError as error:
        message = message or _explain_unwritable(paths, error)
        write_log(f"the result cannot be written: {error}. {_needs(paths)}\nIt is:\n{message}")
        _write_failure_only(paths, message)
        return code or FAILED
    return code


def write_progress(paths: Paths, report: Mapping[str, Any]) -> None:
    """Writes job.json while the job runs. An error is ignored here, because `write_result` reports it.

    Args:
        paths: The directories of the job.
        report: The content of job.json.
    """
    try:
        _write_file(paths, REPORT, _format_report(report))
    except OSError:
        return


def check_writable(paths: Paths, report: Mapping[str, Any]) -> None:
    """Checks that a success can be written on this host, before any host reports one.

    Writes job.json without an exit code. It keeps the space on the disk that it takes.

    Args:
        paths: The directories of the job.
        report: The content of job.json.

    Raises:
        LaunchError: If it can't be written.
    """
    try:
        os.makedirs(paths.output, exist_ok=True)
        _write_file(paths, REPORT, _format_report({**report, "exit_code": None}))
    except OSError as error:
        raise LaunchError(_explain_unwritable(paths, error)) from None


def write_provisional_failure(paths: Paths, result: Result) -> None:
    """Writes the failure file of a job that is being stopped: `docker stop` kills `train` after 10 s.

    An error is ignored here, because `write_result` reports it.

    Args:
        paths: The directories of the job.
        result: The result that the job will have.
    """
    try:
        _write_file(paths, FAILURE, redact.mask_text(result.message))
    except OSError:
        return


def clamp_exit_code(code: int) -> int:
    """Returns an exit code from 0 to 255, 1 for any other. The kernel keeps 8 bits, so that 256 would become 0."""
    return code if 0 <= code <= 255 else FAILED


def _explain_unwritable(paths: Paths, error: OSError) -> str:
    return f"The script succeeded, but that cannot be recorded: {error}. {_needs(paths)}"


def _needs(paths: Paths) -> str:
    return f"Fix: make {paths.output} a writable directory with free space."


def _write_failure_only(paths: Paths, message: str) -> None:
    """Writes the failure file alone, after removing job.json and `success`, for a full disk. Ignores errors."""
    try:
        _remove_file(paths, SUCCESS)
        _remove_file(paths, REPORT)
        _write_file(paths, FAILURE, message)
    except OSError:
        return  # the log has the message


def _format_report(report: Mapping[str, Any]) -> str:
    return json.dumps(report, indent=1) + "\n"


def _write_file(paths: Paths, name: str, text: str) -> None:
    """Writes a file in one step, so that no reader sees half of it. Removes a link or directory in its place."""
    path = os.path.join(paths.output, name)
    _remove_file(paths, f"{name}.part")
    try:
        with open(f"{path}.part", "x", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        if os.path.isdir(path):
            _remove_file(paths, name)
        os.replace(f"{path}.part", path)
    except OSError:
        _remove_file(paths, f"{name}.part")
        raise


def _remove_file(paths: Paths, name: str) -> None:
    path = os.path.join(paths.output, name)
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except IsADirectoryError:
        import shutil  # needed after an odd script only

        shutil.rmtree(path)
