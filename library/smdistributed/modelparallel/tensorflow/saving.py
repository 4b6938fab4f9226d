"""The whole model on one rank, to be written."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.backend.exceptions import StepUsageError
from smdistributed.modelparallel.tensorflow.layers import Whole, observed
from smdistributed.modelparallel.tensorflow.state_mod import state
from smdistributed.modelparallel.tensorflow.variables import StageVariable, is_here, plain


def save(model: Any, path: str) -> None:
    """As `DistributedModel.save_model`."""
    state.require()
    if not model.built:
        raise StepUsageError("save_model() is called before the first step: the model has no weights yet.")
    pipeline = state.group("PP_GROUP")
    if state.group("DP_GROUP")[0] == state.rank:
        if state.rank == pipeline[0]:
            borrowed = _borrow(model, pipeline[1:])
            try:
                _write(model, path)
            finally:
                for variable in borrowed:
                    variable.forget()
        else:
            mine = [place for place, variable in enumerate(model.all_weights) if is_here(variable)]
            state.objects.send(mine, pipeline[0], "save")
            for place in mine:  # one at a time: memory for one more is all that this takes
                state.objects.send(model.all_weights[place].numpy(), pipeline[0], "save")
    state.objects.gather(None, state.group("WORLD"))


def _borrow(model: Any, others: tuple[int, ...]) -> list[StageVariable]:
    weights, borrowed = model.all_weights, []
    for rank in others:
        for place in state.objects.receive(rank, "save"):
            variable = plain(weights[place])
            variable.assign(state.objects.receive(rank, "save"))
            if isinstance(variable, StageVariable):
                variable.is_here = True
                borrowed.append(variable)
    return borrowed


def _write(model: Any, path: str) -> None:
    with observed(Whole()):
        signature = tf.function(lambda inputs: model(inputs, training=False))
        args, kwargs = model.save_spec()
        one = len(args) == 1 and isinstance(args[0], tf.TensorSpec) and not kwargs
        signatures = signature.get_concrete_function(_as_called(model, args[0])) if one else None
        tf.keras.Model.save(model, path, save_format="tf", signatures=signatures)


def note_dtypes(model: Any, args: tuple[Any, ...]) -> None:
    """Note the dtype of what a model is called with first: Keras notes its own, after it has cast it."""
    if not hasattr(model, "_smp_dtypes"):
        dtypes = [tensor.dtype for tensor in tf.nest.flatten(args) if tf.is_tensor(tensor)]
        object.__setattr__(model, "_smp_dtypes", dtypes)


def _as_called(model: Any, spec: tf.TensorSpec) -> tf.TensorSpec:
    return tf.TensorSpec(spec.shape, model._smp_dtypes[0] if model._smp_dtypes else spec.dtype, spec.name)
