"""Collects the weights of all stages on one rank, and writes the whole model."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.backend.exceptions import StepUsageError
from smdistributed.modelparallel.tensorflow.layer_calls import CallUnchanged, observe_calls
from smdistributed.modelparallel.tensorflow.stage_variables import StageVariable, is_on_this_stage, unwrap
from smdistributed.modelparallel.tensorflow.state_mod import state


def save_model(model: Any, path: str) -> None:
    """Every rank calls it, and waits for the others. Raises StepUsageError before the first step."""
    state.require()
    if not model.built:
        raise StepUsageError("save_model() is called before the first step: the model has no weights yet.")
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
