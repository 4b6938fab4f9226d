"""What is asked for: SHOAL_REHEARSE and SHOAL_REHEARSE_GPUS, and where this process stands in its job."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

SWITCH, GPUS, TOLD = "SHOAL_REHEARSE", "SHOAL_REHEARSE_GPUS", "SHOAL_REHEARSE_TOLD"
MOST_GPUS = 128  # torch numbers devices in one byte
# torchrun's and mpirun's, which may both be set: a launcher that mpirun started, or an mpirun that a rank started.
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK")
_LOCAL_RANKS = ("LOCAL_RANK", "SMDATAPARALLEL_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


class RehearsalError(RuntimeError):
    """A variable of the rehearsal has a value that it cannot have; the message says which are allowed."""


@dataclass(frozen=True)
class Settings:
    """One process's part in a rehearsal."""

    gpus: int
    """The GPUs that this host pretends to have."""
    tells: bool
    """Whether this process says that this is a rehearsal: rank 0, unless a process that started it has said so."""
    launched: bool
    """Whether a launcher started this process as a rank."""


def is_asked_for(environ: Mapping[str, str] | None = None) -> bool:
    """Whether SHOAL_REHEARSE is true. Raises RehearsalError when it is neither true nor false."""
    text = (os.environ if environ is None else environ).get(SWITCH, "")
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise RehearsalError(
        f"{SWITCH}={text!r} in the environment: allowed are {', '.join(_TRUE)} to rehearse without GPUs, and "
        f"{', '.join(filter(None, _FALSE))} not to."
    )


def read_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Read the rest. Without SHOAL_REHEARSE_GPUS a host has a GPU for each of its ranks, one where no launcher is.

    Raises RehearsalError when SHOAL_REHEARSE_GPUS is not a number from 1 to 128.
    """
    env = os.environ if environ is None else environ
    ranks, local_ranks, sizes = (_numbers(env, names) for names in (_RANKS, _LOCAL_RANKS, _LOCAL_SIZES))
    gpus = _gpus(env[GPUS]) if env.get(GPUS) else max([1, *sizes, *(rank + 1 for rank in local_ranks)])
    return Settings(gpus, tells=not any(ranks) and not env.get(TOLD), launched=bool(ranks))


def _numbers(env: Mapping[str, str], names: Iterable[str]) -> list[int]:
    """What is no number is for the process group to refuse, not for torch's import."""
    return [int(env[name]) for name in names if env.get(name, "").isdecimal()]


def _gpus(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MOST_GPUS:
        raise RehearsalError(
            f"{GPUS}={text!r} in the environment: it must be a whole number from 1 to {MOST_GPUS}, the GPUs that each "
            "host pretends to have; without it, one for each rank of the host."
        )
    return int(text)
