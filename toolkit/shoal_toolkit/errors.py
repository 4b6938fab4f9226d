"""Errors before or around the script, the exit codes that `train` chooses, and suggestions for misspelt names.

A TrainError has the exit code with which `train` ends, and a message with a fix. StoppedError has the signal's number.
docs/exit-codes.md lists the codes.
"""

from __future__ import annotations

from collections.abc import Iterable

SUCCESS = 0
"""The job has succeeded on all hosts."""
FAILED = 1
"""The script failed, the job could not run, its result could not be written, or `train --preflight` has findings.

Fix: read the failure file
"""
WRONG_CONFIGURATION = 2
"""The configuration of the job is wrong, and nothing was started. A script may fail with this code too.

Fix: change the setting that the failure file names
"""
HOST_LOST = 138
"""A host was lost, or did not come back. The failure is not the script's. Kubeflow reserves this code for that.

Fix: start the job again (docs/restarts.md)
"""


class TrainError(Exception):
    """An error that `train` reports by its message alone, without a traceback."""

    exit_code = FAILED


class ContractError(TrainError):
    """The configuration of the job is wrong. Nothing has been started."""

    exit_code = WRONG_CONFIGURATION


class LaunchError(TrainError):
    """The configuration is right, but the hosts cannot run the job: a host is lost, or mpirun does not start."""


class StoppedError(Exception):
    """A signal stopped the job before anything was started."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def did_you_mean(name: str, choices: Iterable[str], cutoff: float = 0.6) -> str:
    """Returns ' Did you mean X?' for the choice that is closest to a misspelt name.

    Args:
        name: The name that the user wrote.
        choices: The allowed names.
        cutoff: The least similarity, from 0 to 1.

    Returns:
        The question with a leading space; empty if no choice is similar enough.
    """
    import difflib  # imported only for errors: it would slow down every start

    close = difflib.get_close_matches(name, list(choices), n=1, cutoff=cutoff)
    return f" Did you mean {close[0]!r}?" if close else ""
