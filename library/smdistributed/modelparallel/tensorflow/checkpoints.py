"""Checkpoints, of which each rank writes and reads its stage, and the whole model written by one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.backend.exceptions import StepUsageError
from smdistributed.modelparallel.tensorflow.layer_calls import CallUnchanged, observe_calls
from smdistributed.modelparallel.tensorflow.stage_variables import StageVariable, is_on_this_stage, unwrap
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


def save_model(model: Any, path: str) -> None:
    """Every rank calls it, and waits for the others. Raises StepUsageError before the first step."""
    state.require()
    if not model.built:
        raise StepUsageError(
            "save_model() is called before the first step: the model has no weights yet. Fix: call it after."
        )
    pipeline = state.group("PP_GROUP")
    if state.group("DP_GROUP")[0] == state.rank:
        if state.rank == pipeline[0]:
            received = _receive_weights(model, pipeline[1:])
            try:
                _write(model, path)
            finally:
                for variable in received:
                    variable.free()
        else:
            mine = [place for place, variable in enumerate(model.all_weights) if is_on_this_stage(variable)]
            state.objects.send(mine, pipeline[0], "save")
            for place in mine:  # one at a time, so that one more tensor must fit into memory
                state.objects.send(model.all_weights[place].numpy(), pipeline[0], "save")
    state.objects.gather(None, state.group("WORLD"))


def _receive_weights(model: Any, others: tuple[int, ...]) -> list[StageVariable]:
    """Sets the weights of other stages. Returns the variables to free afterwards."""
    weights, received = model.all_weights, []
    for rank in others:
        for place in state.objects.receive(rank, "save"):
            variable = unwrap(weights[place])
            variable.assign(state.objects.receive(rank, "save"))
            if isinstance(variable, StageVariable):
                variable.is_on_this_stage = True
                received.append(variable)
    return received


def _write(model: Any, path: str) -> None:
    """Writes the model, with all weights here, as a SavedModel. A model with one tensor as input gets a signature."""
    with observe_calls(CallUnchanged()):
        signature = tf.function(lambda inputs: model(inputs, training=False))
        args, kwargs = model.save_spec()
        one = len(args) == 1 and isinstance(args[0], tf.TensorSpec) and not kwargs
        signatures = signature.get_concrete_function(_signature_spec(model, args[0])) if one else None
        tf.keras.Model.save(model, path, save_format="tf", signatures=signatures)


def note_dtypes(model: Any, args: tuple[Any, ...]) -> None:
    """Stores the dtypes of the first inputs of a model: Keras stores them only after it has cast the inputs."""
    if not hasattr(model, "_smp_dtypes"):
        dtypes = [tensor.dtype for tensor in tf.nest.flatten(args) if tf.is_tensor(tensor)]
        object.__setattr__(model, "_smp_dtypes", dtypes)


def _signature_spec(model: Any, spec: tf.TensorSpec) -> tf.TensorSpec:
    return tf.TensorSpec(spec.shape, model._smp_dtypes[0] if model._smp_dtypes else spec.dtype, spec.name)
