"""`smp.DistributedModel`: a Keras model whose layers are on stages."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from smdistributed.core.options import warn_without_effect
from smdistributed.core.tensorflow import operations
from smdistributed.modelparallel.backend.exceptions import StepUsageError
from smdistributed.modelparallel.tensorflow import saving
from smdistributed.modelparallel.tensorflow.flow import Flow, flow
from smdistributed.modelparallel.tensorflow.partition import Stages
from smdistributed.modelparallel.tensorflow.state_mod import state
from smdistributed.modelparallel.tensorflow.trace import Trace, trace
from smdistributed.modelparallel.tensorflow.tracing import current
from smdistributed.modelparallel.tensorflow.variables import StageVariable, is_here, plain, undecided

_hooks: list[Callable[[], object]] = []


class DistributedModel(tf.keras.Model):  # type: ignore[misc]
    """Subclass it as tf.keras.Model: layers in the constructor, `call()` (AWS API). Call it in functions under
    `smp.step`: the first call decides which stage has which layer, and makes the weights of this stage's.

    `variables`, `trainable_variables` and their like are those of this rank's stage, and there only after that call.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Variables that a constructor makes wait for the partition as well."""
        super().__init_subclass__(**options)
        construct = cls.__init__

        @functools.wraps(construct)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            if "_smp_made" in self.__dict__:  # the constructor of a class that this one is derived from
                construct(self, *args, **kwargs)
                return
            object.__setattr__(self, "_smp_made", [])  # past Keras, which would track it
            with undecided(self._smp_made):
                construct(self, *args, **kwargs)

        cls.__init__ = init  # type: ignore[method-assign]

    @property
    def losses(self) -> list[Any]:
        """Those that this stage's layers add, and in a step one more, the sum of all others' as a constant."""
        mine = _losses_here(self)
        step = current()
        return mine if step is None else step.share_losses(mine)

    @property
    def trainable_weights(self) -> list[Any]:
        """The trainable variables of this stage."""
        return _here(super().trainable_weights)

    @property
    def non_trainable_weights(self) -> list[Any]:
        """The other variables of this stage."""
        return _here(super().non_trainable_weights)

    @property
    def weights(self) -> list[Any]:
        """All variables of this stage."""
        return _here(super().weights)

    @property
    def all_weights(self) -> list[Any]:
        """The variables of all stages, in the same order on all ranks; those of others have no value here."""
        found: list[Any] = super().weights
        return found

    def profile(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing, and warn: AWS's library measures the partition; here the first call in a step decides it.

        args, kwargs: as `call()` takes them.
        """
        warn_without_effect("profile()", "the model is partitioned by its first call in a function under smp.step")

    def save_model(self, save_path: str = "/opt/ml/model") -> None:
        """Write the whole model as a SavedModel, which tf.keras.models.load_model reads without this library.

        The signature `serving_default` takes what the script called the model with, in that dtype.

        All ranks call this. The first stage of the first replica borrows the others' weights, and writes.

        Raises StepUsageError before the first step.
        """
        saving.save(self, save_path)


def register_post_partition_hook(hook: Callable[[], object]) -> Callable[[], object]:
    """Have a function called when the model has been partitioned, and its variables have values (AWS API)."""
    _hooks.append(hook)
    return hook


def answer(model: DistributedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a call of a model gives that the script makes."""
    step = current()
    if step is None:
        raise StepUsageError(
            f"The model {model.name!r} is called outside of a step, where it has one stage only: call it in a function "
            "under smp.step."
        )
    return step.call_model(model, args, kwargs)


def follow(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Flow:
    """What a call with tensors like these does on which stage. It is decided for layers that are new."""
    saving.note_dtypes(model, args)
    found = trace(model, args, kwargs, is_cut=state.cfg.partitions > 1)
    stages = _stages_of(model)
    with tf.init_scope():
        partition = stages.decide(found)
        if partition is not None:
            if state.rank == 0:
                print(partition, file=sys.stderr)
            _settle(model, found, stages)
            for hook in _hooks:
                hook()
    return flow(found, stages, state.cfg.partitions)


def _stages_of(model: Any) -> Stages:
    stages: Stages | None = getattr(model, "_smp_stages", None)
    if stages is None:
        stages = Stages(state.cfg)
        object.__setattr__(model, "_smp_stages", stages)
    return stages


def _settle(model: DistributedModel, found: Trace, stages: Stages) -> None:
    """Give variables their values where they are; those of replicas are the first one's."""
    for variable in [*model._smp_made, *found.made]:
        variable.decide(stages.has(variable, state.stage))
    model._smp_made.clear()
    for variable in map(plain, model.all_weights):
        if not isinstance(variable, StageVariable):  # made by the script, on all ranks
            variable._smp_elsewhere = not stages.has(variable, state.stage)
    if state.replicas is not None:
        for variable in model.variables:
            (value,) = operations.broadcast([variable.read_value()], 0)
            variable.assign(value)


def _losses_here(model: Any) -> list[Any]:
    """Of layers that have computed them, and of weights that are here. Losses of other stages were never computed."""
    graph = tf.compat.v1.get_default_graph()
    found = []
    for layer in model._flatten_layers():
        computed = layer._eager_losses or layer._losses
        found += [loss for loss in computed if tf.executing_eagerly() or loss.graph is graph]
        if all(map(is_here, layer.weights if layer is not model else [])):
            found += [loss() for loss in layer._callable_losses]
    return found


def _here(variables: list[Any]) -> list[Any]:
    return [variable for variable in variables if is_here(variable)]
