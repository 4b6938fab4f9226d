"""Says once per job that it rehearses: when the first pretended GPU is asked for."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from shoal_rehearsal.settings import TOLD

if TYPE_CHECKING:
    from shoal_rehearsal.settings import Settings

_untold: list[str] = []
_launched = False


def prepare(settings: Settings, real: int) -> None:
    """Compose what is said. real: the GPUs that this host has."""
    global _launched
    _launched = settings.launched
    if not settings.tells:
        return
    passed_over = f" The {real} real GPUs of this host are not used." if real else ""
    _untold.append(
        "SHOAL REHEARSAL: this is not a training run. GPUs are pretended and all results come from the CPU; nothing is "
        f"told about speed or GPU memory. GPUs pretended per host: {settings.gpus} (SHOAL_REHEARSE_GPUS).{passed_over}"
    )


def tell() -> None:
    """Say it, unless it has been said; processes started from here on do not repeat it."""
    if not _launched and "torch.distributed.launcher.api" in sys.modules:
        return  # torchrun itself, which looks for GPUs and is no rank
    while _untold:
        os.environ[TOLD] = "1"
        print(_untold.pop(), file=sys.stderr, flush=True)
