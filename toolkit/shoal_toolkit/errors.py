"""Errors before or around the script, and suggestions for misspelt names.

A TrainError has the exit code with which `train` ends, and a message with a fix. StoppedError has the signal's number.
"""

from __future__ import annotations

from collections.abc import Iterable


class TrainError(Exception):
    """An error that `train` reports by its message alone, without a traceback."""

    exit_code = 1


class ContractError(TrainError):
    """The configuration of the job is wrong. Nothing has been started."""

    exit_code = 2


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
