"""Chooses the GPU of a rank, and hides the others from TensorFlow."""

from __future__ import annotations

from contextlib import suppress

import tensorflow as tf

from smdistributed.core.exceptions import SMDDPError


def take_gpu(local_rank: int) -> None:
    """Makes one GPU the only one that TensorFlow sees, and lets its memory grow. Does nothing without GPUs.

    Args:
        local_rank: Chooses the GPU, modulo their number.

    Raises:
        SMDDPError: If TensorFlow already uses other GPUs.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return
    mine = gpus[local_rank % len(gpus)]
    try:
        tf.config.set_visible_devices(mine, "GPU")
        with suppress(ValueError):  # the script has set a limit of its own
            tf.config.experimental.set_memory_growth(mine, True)
    except RuntimeError as error:
        if tf.config.get_visible_devices("GPU") != [mine]:
            raise SMDDPError(
                f"TensorFlow has begun to use its GPUs before init() could choose the GPU of local rank {local_rank}: "
                f"call init() right after the imports. ({error})"
            ) from None
