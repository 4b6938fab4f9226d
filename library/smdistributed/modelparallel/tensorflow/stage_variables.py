"""Variables that get a value only on the stage of their layer, which is known after they are created."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.ops.resource_variable_ops import ResourceVariable, UninitializedVariable

_ATTRIBUTES = ("trainable", "name", "shape", "dtype", "constraint", "synchronization", "aggregation")


class StageVariable(UninitializedVariable):  # type: ignore[misc]
    """A variable of a layer. On other stages it has no value, takes no memory, and is in no checkpoint.

    `is_on_this_stage` is whether it has a value on this rank. `initial` computes the first value; `place` calls it.
    """

    is_on_this_stage = False

    def __init__(self, initial: Callable[[], Any], **attributes: Any) -> None:
        self._initial: Callable[[], Any] | None = initial
        super().__init__(**attributes)

    def place(self, is_on_this_stage: bool) -> None:
        """Computes its value if it is on this stage and has none; frees one that it has if it is on another.

        On another stage its initializer runs in a graph that is thrown away. Must be called for all variables of a
        model in the order of their creation. Initializers then draw the same random numbers as in a model that is not
        split.
        """
        has_value = self.is_initialized()  # the script has set it, or read it
        initial, self._initial, self.is_on_this_stage = self._initial, None, is_on_this_stage
        if has_value and not is_on_this_stage:
            self.free()
        elif initial is not None and is_on_this_stage and not has_value:
            self._initialize(initial)
        elif initial is not None and not has_value:
            with FuncGraph("elsewhere").as_default():
                initial()

    def free(self) -> None:
        """Frees the memory of the value: from now on the variable is on another stage."""
        self.is_on_this_stage = False
        tf.raw_ops.AssignVariableOp(resource=self.handle, value=tf.zeros([0], self.dtype), validate_shape=False)

    def _initialize(self, initial: Callable[[], Any]) -> None:
        value = initial()
        self.assign(getattr(value, "wrapped_value", value))  # a checkpoint wraps its value

    def _read_variable_op(self, *args: Any, **kwargs: Any) -> Any:
        """Reads the variable. In eager code, first initializes one that has no stage yet."""
        if self._initial is not None and tf.executing_eagerly() and not self.is_initialized():
            self._initialize(self._initial)
        return super()._read_variable_op(*args, **kwargs)

    @property
    def _may_have_value(self) -> bool:
        return self.is_on_this_stage or self._initial is not None

    def _serialize_to_tensors(self) -> dict[str, Any]:
        return super()._serialize_to_tensors() if self._may_have_value else {}

    def _gather_saveables_for_checkpoint(self) -> dict[str, Any]:
        """The older interface, which Keras' wrapper for mixed precision calls."""
        return super()._gather_saveables_for_checkpoint() if self._may_have_value else {}

    def _restore_from_tensors(self, restored_tensors: dict[str, Any]) -> Any:
        return super()._restore_from_tensors(restored_tensors) if self._may_have_value else None


def create_library_variable(value: Any, name: str, trainable: bool = True) -> Any:
    """Creates a variable of this library, which is never a StageVariable: scopes for variable creators do not see it.

    It is hidden from tf.function too: TensorFlow traces functions that create variables twice.
    """
    with tf.init_scope():
        return ResourceVariable(value, name=name, trainable=trainable)


def unwrap(variable: Any) -> Any:
    """Returns the variable inside a wrapper for mixed precision; a variable without one itself."""
    return getattr(variable, "_variable", variable)


def is_on_this_stage(variable: Any) -> bool:
    """Whether a variable has its value on this rank's stage; true for variables of no model."""
    found = unwrap(variable)
    return (
        found.is_on_this_stage if isinstance(found, StageVariable) else not getattr(found, "_smp_on_other_stage", False)
    )


def is_of_distributed_model(variable: Any) -> bool:
    return isinstance(unwrap(variable), StageVariable) or hasattr(unwrap(variable), "_smp_on_other_stage")


@contextmanager
def create_stage_variables(created: list[StageVariable]) -> Iterator[None]:
    """Makes variables that are created inside StageVariables, without a value, and appends them to `created`."""

    def create(_: Callable[..., Any], **attributes: Any) -> StageVariable:
        given = attributes["initial_value"]
        initial: Callable[[], Any] = given if callable(given) else lambda: given
        kept = {name: attributes.get(name) for name in _ATTRIBUTES}
        if kept["shape"] is None or kept["dtype"] is None:
            with FuncGraph("shape").as_default():
                found = tf.convert_to_tensor(initial(), dtype=kept["dtype"])
            kept["shape"], kept["dtype"] = found.shape, found.dtype
        created.append(StageVariable(initial, **kept))
        return created[-1]

    with tf.variable_creator_scope(create):
        yield
