"""Prints once per job that it is a rehearsal, when the script first asks for a GPU."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from shoal_rehearsal.settings import NOTICE_PRINTED

if TYPE_CHECKING:
    from shoal_rehearsal.settings import RehearsalSettings

_unprinted: list[str] = []
_launched = False


def prepare(settings: RehearsalSettings, real: int) -> None:
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


def print_notice() -> None:
    """Prints the notice on stderr, once, if it was prepared. torchrun's own process prints nothing.

    It sets SHOAL_REHEARSE_TOLD in os.environ, so that processes that this one starts do not repeat it.
    """
    if not _launched and "torch.distributed.launcher.api" in sys.modules:
        return  # torchrun itself, which looks for GPUs and is not a rank
    while _unprinted:
        os.environ[NOTICE_PRINTED] = "1"
        print(_unprinted.pop(), file=sys.stderr, flush=True)
