"""Checkpoints of a model on several stages: each rank writes and reads the weights of its stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.tensorflow.state_mod import state


class CheckpointManager:
    """A tf.train.CheckpointManager with a directory `mp_rank_N` for each rank of a replica (AWS API).

    Args:
        checkpoint: A tf.train.Checkpoint of this rank's model, optimizer and other objects.
        directory: Contains those directories. Hosts may share it, or have one each.
        max_to_keep: How many checkpoints stay; None: all.
        checkpoint_name: The beginning of the files' names.

    Raises:
        StepUsageError: Before `smp.init`.
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
        """The path of this rank's newest checkpoint; None if there is none."""
        found: str | None = self._manager.latest_checkpoint
        return found

    def save(self, checkpoint_number: int | None = None) -> str | None:
        """Writes this rank's checkpoint, and removes old ones if there are more than `max_to_keep`.

        No rank waits for others.

        All ranks call this; only the first replica writes.

        Args:
            checkpoint_number: The number in its name. Default: the next one.

        Returns:
            Its path; None on other replicas.
        """
        if state.group("DP_GROUP")[0] != state.rank:
            return None
        path: str = self._manager.save(checkpoint_number=checkpoint_number)
        return path

    def restore(self, restore_prefix: str | None = None) -> Any:
        """Reads this rank's checkpoint into the objects of `checkpoint`. All ranks call this.

        Args:
            restore_prefix: Its name, such as `ckpt-3`. Default: the newest one.

        Returns:
            The status of tf.train.Checkpoint.restore; None if there is no such checkpoint, and nothing changes.
        """
        path = self.latest_checkpoint
        if restore_prefix is not None:
            path = str(Path(self.directory, restore_prefix))
        if path is None or not tf.io.gfile.exists(f"{path}.index"):
            return None
        return self.checkpoint.restore(path)
