"""Reads SHOAL_REHEARSE, SHOAL_REHEARSE_GPUS and variables of launchers. Prints once per job that it is a rehearsal."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

SWITCH, GPUS, NOTICE_PRINTED = "SHOAL_REHEARSE", "SHOAL_REHEARSE_GPUS", "SHOAL_REHEARSE_TOLD"
MOST_GPUS = 128  # torch numbers devices in one byte
# torchrun's and mpirun's, which may both be set: a launcher that mpirun started, or an mpirun that a rank started.
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK")
_LOCAL_RANKS = ("LOCAL_RANK", "SMDATAPARALLEL_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")
_unprinted: list[str] = []
_launched = False


class RehearsalError(RuntimeError):
    """An environment variable has an invalid value; the message says which values are allowed."""


@dataclass(frozen=True)
class RehearsalSettings:
    gpus: int
    """The number of emulated GPUs of this host."""
    prints_notice: bool
    """Whether this process prints the notice: rank 0, unless a parent process has printed it."""
    launched: bool
    """Whether a launcher started this process as a rank."""


def is_enabled(environ: Mapping[str, str] | None = None) -> bool:
    """Whether SHOAL_REHEARSE is true. Raises RehearsalError if it is neither true nor false."""
    text = (os.environ if environ is None else environ).get(SWITCH, "")
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise RehearsalError(
        f"{SWITCH}={text!r} in the environment. Allowed: {', '.join(_TRUE)} to rehearse without GPUs, and "
        f"{', '.join(filter(None, _FALSE))} not to. Fix: set one of these, or unset it."
    )


def read_settings(environ: Mapping[str, str] | None = None) -> RehearsalSettings:
    """Reads the other settings. Without SHOAL_REHEARSE_GPUS a host has one GPU for each of its ranks.

    Raises RehearsalError if SHOAL_REHEARSE_GPUS is not a whole number from 1 to 128.
    """
    env = os.environ if environ is None else environ
    ranks, local_ranks, sizes = (_numbers(env, names) for names in (_RANKS, _LOCAL_RANKS, _LOCAL_SIZES))
    gpus = _parse_gpus(env[GPUS]) if env.get(GPUS) else max([1, *sizes, *(rank + 1 for rank in local_ranks)])
    return RehearsalSettings(gpus, prints_notice=not any(ranks) and not env.get(NOTICE_PRINTED), launched=bool(ranks))


def _numbers(env: Mapping[str, str], names: Iterable[str]) -> list[int]:
    """Returns the variables that are numbers. Invalid ones are left to the process group, which rejects them."""
    return [int(env[name]) for name in names if env.get(name, "").isdecimal()]


def _parse_gpus(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MOST_GPUS:
        raise RehearsalError(
            f"{GPUS}={text!r} in the environment: it must be a whole number from 1 to {MOST_GPUS}, the emulated GPUs "
            "of each host. Fix: set one of these, or unset it: then there is one for each rank of the host."
        )
    return int(text)


def prepare_notice(settings: RehearsalSettings, real: int) -> None:
    """Prepares the notice, unless another process prints it, and notes whether a launcher started this process.

    `real` is the number of GPUs that this host has.
    """
    global _launched
    _launched = settings.launched
    if not settings.prints_notice:
        return
    unused = f" The {real} real GPUs of this host are not used." if real else ""
    _unprinted.append(
        "SHOAL REHEARSAL: this is not a training run. GPUs are emulated on the CPU; speed and GPU memory are not. "
        f"Emulated GPUs per host: {settings.gpus} (SHOAL_REHEARSE_GPUS).{unused}"
    )


def print_notice() -> bool:
    """Prints the notice on stderr, once, if it was prepared. torchrun's own process prints nothing.

    Returns whether it did, in a rank that a launcher started.

    It sets SHOAL_REHEARSE_TOLD in os.environ, so that processes that this one starts do not repeat it.
    """
    if not _launched and "torch.distributed.launcher.api" in sys.modules:
        return False  # torchrun itself, which looks for GPUs and is not a rank
    printed = bool(_unprinted)
    while _unprinted:
        os.environ[NOTICE_PRINTED] = "1"
        print(_unprinted.pop(), file=sys.stderr, flush=True)
    return printed and _launched
