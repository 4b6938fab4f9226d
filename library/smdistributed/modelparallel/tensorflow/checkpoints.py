"""Checkpoints of a model on stages: each rank writes, and reads, what is on its stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.tensorflow.state_mod import state


class CheckpointManager:
    """As tf.train.CheckpointManager, with a directory `mp_rank_N` for each rank of a replica (AWS API).

    checkpoint: a tf.train.Checkpoint of this rank's model, optimizer and whatever else.
    directory: where those directories are; every host of the job may have its own, or all the same.
    """

    def __init__(
        self,
        checkpoint: Any,
        directory: str = "/opt/ml/checkpoints",
        max_to_keep: int | None = None,
        checkpoint_name: str = "ckpt",
    ) -> None:
        state.require()
        self.checkpoint = checkpoint
        self.directory = str(Path(directory, f"mp_rank_{state.group('MP_GROUP').index(state.rank)}"))
        self._manager = tf.train.CheckpointManager(
            checkpoint, self.directory, max_to_keep=max_to_keep, checkpoint_name=checkpoint_name
        )

    @property
    def latest_checkpoint(self) -> str | None:
        """The path of the newest one of this rank; None: there is none."""
        found: str | None = self._manager.latest_checkpoint
        return found

    def save(self, checkpoint_number: int | None = None) -> str | None:
        """Write the next one; all ranks call this. Gives its path; None on replicas but the first, which write none."""
        if state.group("DP_GROUP")[0] != state.rank:
            return None
        path: str = self._manager.save(checkpoint_number=checkpoint_number)
        return path

    def restore(self, restore_prefix: str | None = None) -> Any:
        """Read one, by its name (`ckpt-3`), or the newest; all ranks call this.

        Gives the status of tf.train.Checkpoint.restore; None where there is none, and nothing was changed.
        """
        path = self.latest_checkpoint
        if restore_prefix is not None:
            path = str(Path(self.directory, restore_prefix))
        if path is None or not tf.io.gfile.exists(f"{path}.index"):
            return None
        return self.checkpoint.restore(path)
