"""The job's outcome: the one place that writes output/failure, success and job.json and says the exit code."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shoal_toolkit import redact
from shoal_toolkit.contract import Paths
from shoal_toolkit.errors import LaunchError, TrainError
from shoal_toolkit.log import say

FAILURE, SUCCESS, REPORT = "failure", "success", "job.json"
_TRACEBACK = "Traceback (most recent call last):"
_LONGEST_LINE = 300
_LONGEST_COMMAND = 200
_SHOWN = 1024  # SageMaker shows that much of the failure file


class Verdict(NamedTuple):
    """How the job ended. `message` is the text of the failure file; empty for a success."""

    exit_code: int
    message: str = ""


class Failure(NamedTuple):
    """What is known of a rank, or a launcher, that failed."""

    exit_code: int
    where: str  # such as "rank 1 on algo-2"
    command: Sequence[str]
    stderr: str  # its end


def of_error(error: TrainError) -> Verdict:
    """The verdict on a job that was not started, or was lost."""
    return Verdict(error.exit_code, str(error))


def of_failure(failure: Failure) -> Verdict:
    """The verdict on a job whose script failed: the exception first, then who, then the end of the traceback.

    SageMaker shows the first 1,024 characters: the essentials fit.
    """
    command = _clip(" ".join(redact.arguments(failure.command)), _LONGEST_COMMAND)
    exception, end = _exception(failure.stderr)
    ended = exit_description(failure.exit_code)
    head = exception or f"The script {ended}, and wrote nothing to stderr."
    message = f"{head}\n{failure.where} {ended}: {command}"
    return Verdict(failure.exit_code, f"{message}\n\n{_last_lines(end, _SHOWN - len(message) - 2)}" if end else message)


def of_stop(number: int) -> Verdict:
    """The verdict on a job that was told to stop."""
    name = signal.Signals(number).name
    return Verdict(
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
    """Remove an earlier job's verdict, and check that this one's can be written: better now than after the training."""
    try:
        for directory in (paths.model, os.path.join(paths.output, "data")):  # a bare `docker run` brings none
            os.makedirs(directory, exist_ok=True)
        for name in (FAILURE, SUCCESS):
            _remove(paths, name)
        _write(paths, REPORT, _as_json(report))
    except OSError as error:
        raise LaunchError(
            f"The output directory cannot be written: {error}. Mount a writable directory at {paths.output}."
        ) from None


def conclude(paths: Paths, verdict: Verdict, report: Mapping[str, Any]) -> int:
    """Write the verdict, and return the exit code. A verdict that cannot be written is a failure in any case."""
    code = verdict.exit_code
    if code:
        # The script has written its traceback to the log already.
        summary = verdict.message.partition("\n\n")[0]
        say(f"the job failed with exit code {code}: {summary}")
    try:
        os.makedirs(paths.output, exist_ok=True)
        _remove(paths, SUCCESS if code else FAILURE)  # of an earlier job that this one did not come to remove
        _write(paths, REPORT, _as_json({**report, "exit_code": code}))
        _write(paths, FAILURE if code else SUCCESS, verdict.message)
    except OSError as error:
        say(f"the verdict cannot be written: {error}. {paths.output} must be a writable directory.")
        return code or 1
    return code


def _as_json(report: Mapping[str, Any]) -> str:
    return json.dumps(report, indent=1) + "\n"


def _write(paths: Paths, name: str, text: str) -> None:
    """Write a file in one step: nobody reads half of it."""
    path = os.path.join(paths.output, name)
    with open(f"{path}.part", "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
    os.replace(f"{path}.part", path)


def _remove(paths: Paths, name: str) -> None:
    try:
        os.unlink(os.path.join(paths.output, name))
    except FileNotFoundError:
        return


def _exception(stderr: str) -> tuple[str, str]:
    """Return the line that names the error, and the end of what was written: the last traceback if there is one."""
    start = stderr.rfind(_TRACEBACK)
    if start < 0:
        return _last_words(stderr), stderr.strip()
    lines = stderr[start:].splitlines()
    for index, line in enumerate(lines[1:], start=1):
        # Frames are indented; the first line that is not names the exception.
        if line.strip() and not line[0].isspace() and re.match(r"[\w.]+(:|$)", line):
            return _clip(line, _LONGEST_LINE), "\n".join(lines[: index + 8])
    return _last_words(stderr[start:]), "\n".join(lines)


def _last_words(text: str) -> str:
    """Return the last line that says something: mpirun and exception groups end with a rule of dashes."""
    lines = [line.strip() for line in text.splitlines() if any(character.isalnum() for character in line)]
    return _clip(lines[-1], _LONGEST_LINE) if lines else ""


def _clip(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _last_lines(text: str, length: int) -> str:
    """Return the last whole lines that fit, and at least the end of the last one."""
    if len(text) <= length:
        return text
    kept = text[-length:]
    return kept.partition("\n")[2] or kept
