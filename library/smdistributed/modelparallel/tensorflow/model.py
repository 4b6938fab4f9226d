"""`smp.DistributedModel`: a Keras model with its layers on stages, and `smp.register_post_partition_hook`.

Its first call in a step assigns layers to stages, gives variables their values and plans the transfers.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from smdistributed.core.options import warn_without_effect
from smdistributed.core.tensorflow import operations
from smdistributed.modelparallel.backend.exceptions import StepUsageError
from smdistributed.modelparallel.tensorflow.checkpoints import note_dtypes, save_model
from smdistributed.modelparallel.tensorflow.model_trace import ModelTrace, trace_model
from smdistributed.modelparallel.tensorflow.partition import StageAssignment
from smdistributed.modelparallel.tensorflow.stage_variables import (
    StageVariable,
    create_stage_variables,
    is_on_this_stage,
    unwrap,
)
from smdistributed.modelparallel.tensorflow.state_mod import state
from smdistributed.modelparallel.tensorflow.step_graph import current_step
from smdistributed.modelparallel.tensorflow.transfers import TransferPlan, plan_transfers

_hooks: list[Callable[[], object]] = []


class DistributedModel(tf.keras.Model):  # type: ignore[misc]
    """A Keras model that is split over stages. Subclass it as you would tf.keras.Model (AWS API).

    Call it in functions under `smp.step`. The first call assigns layers to stages, and creates the weights of this
    rank's stage. After that call `variables`, `trainable_variables` and the like cover this rank's stage.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Wraps the constructor, so that its variables get no value before the model is partitioned."""
        super().__init_subclass__(**options)
        construct = cls.__init__

        @functools.wraps(construct)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            if "_smp_created" in self.__dict__:  # the constructor of a base class
                construct(self, *args, **kwargs)
                return
            object.__setattr__(self, "_smp_created", [])  # past Keras, which would track it
            with create_stage_variables(self._smp_created):
                construct(self, *args, **kwargs)

        cls.__init__ = init  # type: ignore[method-assign]

    @property
    def losses(self) -> list[Any]:
        """The losses of this stage's layers. In a step, also the sum of each other stage's losses, as a constant."""
        mine = _losses_of_this_stage(self)
        step = current_step()
        return mine if step is None else step.share_losses(mine)

    @property
    def trainable_weights(self) -> list[Any]:
        """The trainable variables of this stage."""
        return _on_this_stage(super().trainable_weights)

    @property
    def non_trainable_weights(self) -> list[Any]:
        """The other variables of this stage."""
        return _on_this_stage(super().non_trainable_weights)

    @property
    def weights(self) -> list[Any]:
        """All variables of this stage."""
        return _on_this_stage(super().weights)

    @property
    def all_weights(self) -> list[Any]:
        """The variables of all stages, in the same order on all ranks. Variables of other stages have no value here."""
        found: list[Any] = super().weights
        return found

    def profile(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing, and warns: AWS's library measures layers here; this one partitions in the first step.

        Args:
            args: As for `call()`.
            kwargs: As for `call()`.
        """
        warn_without_effect("profile()", "the model is partitioned by its first call in a function under smp.step")

    def save_model(self, save_path: str = "/opt/ml/model") -> None:
        """Writes the whole model as a SavedModel, which tf.keras.models.load_model reads without this library.

        All ranks call this. The first stage of the first replica receives the weights of other stages, and writes. The
        signature `serving_default` takes a tensor of the dtype that the script called the model with.

        Args:
            save_path: A directory, which is created.

        Raises:
            StepUsageError: Before the first step.
        """
        save_model(self, save_path)


def register_post_partition_hook(hook: Callable[[], object]) -> Callable[[], object]:
    """Registers a function to call when a model has been partitioned and its variables have values (AWS API).

    Args:
        hook: Takes no arguments.

    Returns:
        The function, so that this can be a decorator.
    """
    _hooks.append(hook)
    return hook


def call_model(model: DistributedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handles a call of a model by the script. Raises StepUsageError outside of a step."""
    step = current_step()
    if step is None:
        raise StepUsageError(
            f"The model {model.name!r} is called outside of a step, and has one stage only there. Fix: call it in a "
            "function under smp.step."
        )
    return step.call_model(model, args, kwargs)


def plan_call(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TransferPlan:
    """Plans the transfers of a call. Layers that are called for the first time are assigned to stages.

    Then rank 0 prints the partition, variables get their values, and the post-partition hooks run. Raises
    SMPConfigError or SMPUnsupportedError if the model cannot be split.
    """
    note_dtypes(model, args)
    trace = trace_model(model, args, kwargs, is_split=state.cfg.partitions > 1)
    stages = _stage_assignment(model)
    with tf.init_scope():
        partition = stages.assign(trace)
        if partition is not None:
            if state.rank == 0:
                print(partition, file=sys.stderr)
            _place_variables(model, trace, stages)
            for hook in _hooks:
                hook()
    return plan_transfers(trace, stages, state.cfg.partitions)


def _stage_assignment(model: Any) -> StageAssignment:
    stages: StageAssignment | None = getattr(model, "_smp_stages", None)
    if stages is None:
        stages = StageAssignment(state.cfg)
        object.__setattr__(model, "_smp_stages", stages)
    return stages


def _place_variables(model: DistributedModel, trace: ModelTrace, stages: StageAssignment) -> None:
    """Gives this stage's variables their values and marks the others; replicas take the values of the first one."""
    for variable in [*model._smp_created, *trace.created]:
        variable.place(stages.has(variable, state.stage))
    model._smp_created.clear()
    for variable in map(unwrap, model.all_weights):
        if not isinstance(variable, StageVariable):  # created by the script, on all ranks
            variable._smp_on_other_stage = not stages.has(variable, state.stage)
    if state.replicas is not None:
        for variable in model.variables:
            (value,) = operations.broadcast([variable.read_value()], 0)
            variable.assign(value)


def _losses_of_this_stage(model: Any) -> list[Any]:
    """Returns the losses of this stage's layers and weights; in a graph, without the losses of other graphs."""
    graph = tf.compat.v1.get_default_graph()
    found = []
    for layer in model._flatten_layers():
        computed = layer._eager_losses or layer._losses
        found += [loss for loss in computed if tf.executing_eagerly() or loss.graph is graph]
        if all(map(is_on_this_stage, layer.weights if layer is not model else [])):
            found += [loss() for loss in layer._callable_losses]
    return found


def _on_this_stage(variables: list[Any]) -> list[Any]:
    return [variable for variable in variables if is_on_this_stage(variable)]
