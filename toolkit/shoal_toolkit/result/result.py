"""The job's outcome: the one place that writes output/failure, success and job.json and says the exit code."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping, Sequence

from shoal_toolkit import redact
from shoal_toolkit.errors import LaunchError, TrainError
from shoal_toolkit.job.contract import Paths
from shoal_toolkit.light_typing import Any, NamedTuple
from shoal_toolkit.log import say

_LONGEST_WORDS = 1 << 16
FAILURE, SUCCESS, REPORT, METRICS = "failure", "success", "job.json", "metrics.jsonl"


class Result(NamedTuple):
    """How the job ended. `message` is the text of the failure file; empty for a success."""

    exit_code: int
    message: str = ""


class Failure(NamedTuple):
    """What is known of a rank, or a launcher, that failed."""

    exit_code: int
    where: str  # such as "rank 1 on algo-2", or "mpirun"
    command: Sequence[str]
    stderr: str  # its end
    facts: Mapping[str, int] = {}  # of its host: see oom.py
    launcher: bool = False  # it is no rank that failed
    reason: str = ""  # where stderr is not searched for it: mpirun's (see daemonlog.py)


def of_error(error: TrainError) -> Result:
    """The result on a job that was not started, or was lost."""
    return Result(error.exit_code, str(error))


def of_failure(failure: Failure) -> Result:
    """The result on a job whose script failed."""
    from shoal_toolkit.result import diagnosis  # a job that succeeds does without it

    return Result(failure.exit_code, diagnosis.message(failure))


def of_stop(number: int) -> Result:
    """The result on a job that was told to stop."""
    name = signal.Signals(number).name
    return Result(
        128 + number, f"The job was stopped: `train` received {name} (spot interruption, StopTrainingJob, ...)."
    )


def exit_description(code: int) -> str:
    """Say an exit code in words.

    >>> exit_description(137)
    'was killed by signal 9 (SIGKILL)'
    """
    number = code - 128
    if number in signal.Signals.__members__.values():
        return f"was killed by signal {number} ({signal.Signals(number).name})"
    return f"exited with code {code}"


def begin(paths: Paths, report: Mapping[str, Any]) -> None:
    """Remove an earlier job's result, and check that this one's can be written: better now than after the training."""
    try:
        for directory in (paths.model, os.path.join(paths.output, "data")):  # a bare `docker run` brings none
            os.makedirs(directory, exist_ok=True)
        for name in (FAILURE, SUCCESS, METRICS):
            _remove(paths, name)
        _write(paths, REPORT, _as_json(report))
    except OSError as error:
        raise LaunchError(
            f"The output directory cannot be written: {error}. This process (uid {os.getuid()}) must be able to write "
            f"into {paths.output} and {paths.model}: mount writable directories there."
        ) from None


def words_of_script(paths: Paths) -> str:
    """Return what the script itself wrote into the failure file, as AWS's contract asks of it; mostly nothing.

    Source: "How Amazon SageMaker AI processes training output" in AWS's developer guide.
    """
    try:
        with open(os.path.join(paths.output, FAILURE), encoding="utf-8", errors="replace") as file:
            return file.read(_LONGEST_WORDS).strip()
    except OSError:
        return ""


def conclude(paths: Paths, result: Result, report: Mapping[str, Any]) -> int:
    """Write the result, and return the exit code. A result that cannot be written is a failure in any case."""
    code = exit_status(result.exit_code)
    message = redact.text(result.message)
    if code:
        # The script has written its traceback to the log already.
        summary = message.partition("\n\n")[0]
        say(f"the job failed with exit code {code}: {summary}")
    full_report = _as_json({**report, "exit_code": code})
    files = {FAILURE: message, REPORT: full_report} if code else {REPORT: full_report, SUCCESS: ""}
    try:
        os.makedirs(paths.output, exist_ok=True)
        _remove(paths, SUCCESS if code else FAILURE)  # of an earlier job that this one did not come to remove
        for name, text in files.items():
            _write(paths, name, text)
    except OSError as error:
        message = message or _unrecorded(paths, error)
        say(f"the result cannot be written: {error}. {_needs(paths)}\nIt is:\n{message}")
        _write_failure_alone(paths, message)
        return code or 1
    return code


def rehearse(paths: Paths, report: Mapping[str, Any]) -> None:
    """Check that a success can be written on this host, before any host says that there is one.

    Raises LaunchError where it cannot. The space that the report takes stays taken; it tells no result yet.
    """
    try:
        os.makedirs(paths.output, exist_ok=True)
        _write(paths, REPORT, _as_json({**report, "exit_code": None}))
    except OSError as error:
        raise LaunchError(_unrecorded(paths, error)) from None


def foretell(paths: Paths, failed: Result) -> None:
    """Write the failure file of a job that is being stopped: `docker stop` kills after 10 s, whatever still saves."""
    try:
        _write(paths, FAILURE, redact.text(failed.message))
    except OSError:
        return  # the result will say so


def _unrecorded(paths: Paths, error: OSError) -> str:
    return f"The script ended well, and that cannot be recorded: {error}. {_needs(paths)}"


def _needs(paths: Paths) -> str:
    return f"{paths.output} must be a writable directory, with space in it."


def _write_failure_alone(paths: Paths, message: str) -> None:
    """Where the disk is full, the report makes room for what counts."""
    try:
        _remove(paths, SUCCESS)
        _remove(paths, REPORT)
        _write(paths, FAILURE, message)
    except OSError:
        return  # that has been said


def exit_status(code: int) -> int:
    """Return a code as the kernel will hand it on: of 256, say, it would make 0."""
    return code if 0 <= code <= 255 else 1


def _as_json(report: Mapping[str, Any]) -> str:
    return json.dumps(report, indent=1) + "\n"


def _write(paths: Paths, name: str, text: str) -> None:
    """Write a file in one step: nobody reads half of it."""
    path = os.path.join(paths.output, name)
    try:
        with open(f"{path}.part", "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        os.replace(f"{path}.part", path)
    except OSError:
        _remove(paths, f"{name}.part")
        raise


def _remove(paths: Paths, name: str) -> None:
    try:
        os.unlink(os.path.join(paths.output, name))
    except FileNotFoundError:
        return
