"""What can go wrong before or around the script. Each error owns the exit code of `train`, and says what to do."""

from __future__ import annotations

from collections.abc import Iterable


class TrainError(Exception):
    """An error that `train` explains instead of showing its own traceback."""

    exit_code = 1


class ContractError(TrainError):
    """The job as configured cannot be launched: nothing has been started."""

    exit_code = 2


class LaunchError(TrainError):
    """The job is well described, and the machines cannot do it: a host is missing or lost, mpirun does not start."""


class StoppedError(Exception):
    """A signal asked for the job's end before anything was started."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def did_you_mean(name: str, choices: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ' Did you mean X?' for the closest choice, or nothing. cutoff: how alike, from 0 to 1, it must be."""
    import difflib  # only on the way to an error: it would cost every start

    close = difflib.get_close_matches(name, list(choices), n=1, cutoff=cutoff)
    return f" Did you mean {close[0]!r}?" if close else ""
