"""Variables of layers whose stage is not known yet: they have a shape, and get a value where their layer is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.ops.resource_variable_ops import ResourceVariable, UninitializedVariable

_ABOUT = ("trainable", "name", "shape", "dtype", "constraint", "synchronization", "aggregation")


class StageVariable(UninitializedVariable):  # type: ignore[misc]
    """A variable of a layer. On the stage that has the layer it is like any other; on the others it has no value, takes
    no memory and is in no checkpoint.

    is_here: whether it has a value on this rank.
    """

    is_here = False

    def __init__(self, initial: Callable[[], Any], **about: Any) -> None:
        self._initial: Callable[[], Any] | None = initial
        super().__init__(**about)

    def decide(self, is_here: bool) -> None:
        """Compute its value, if it is here; to be called for all variables of a model in the order of their creation,
        so that initializers draw the same random numbers as those of a model in one piece."""
        has_value = self.is_initialized()  # the script has set it, or read it
        initial, self._initial, self.is_here = self._initial, None, is_here
        if has_value and not is_here:
            self.forget()
        elif initial is not None and is_here and not has_value:
            self._begin_with(initial)
        elif initial is not None and not has_value:
            with FuncGraph("elsewhere").as_default():
                initial()

    def forget(self) -> None:
        """Free the memory of a value that is not wanted here."""
        self.is_here = False
        tf.raw_ops.AssignVariableOp(resource=self.handle, value=tf.zeros([0], self.dtype), validate_shape=False)

    def _begin_with(self, initial: Callable[[], Any]) -> None:
        value = initial()
        self.assign(getattr(value, "wrapped_value", value))  # that of a checkpoint comes wrapped

    def _read_variable_op(self, *args: Any, **kwargs: Any) -> Any:
        """Whoever reads it before the stages are known gets the value that it would have."""
        if self._initial is not None and tf.executing_eagerly() and not self.is_initialized():
            self._begin_with(self._initial)
        return super()._read_variable_op(*args, **kwargs)

    @property
    def _may_have_value(self) -> bool:
        return self.is_here or self._initial is not None

    def _serialize_to_tensors(self) -> dict[str, Any]:
        return super()._serialize_to_tensors() if self._may_have_value else {}

    def _gather_saveables_for_checkpoint(self) -> dict[str, Any]:
        """The older way, which Keras' wrapper for mixed precision goes."""
        return super()._gather_saveables_for_checkpoint() if self._may_have_value else {}

    def _restore_from_tensors(self, restored_tensors: dict[str, Any]) -> Any:
        return super()._restore_from_tensors(restored_tensors) if self._may_have_value else None


def own_variable(value: Any, name: str, trainable: bool = True) -> Any:
    """A variable of this package. A tf.function that is being traced does not hear of it: it would trace twice, as for
    variables that the function makes."""
    with tf.init_scope():
        return ResourceVariable(value, name=name, trainable=trainable)


def plain(variable: Any) -> Any:
    """Without what mixed precision has put around it."""
    return getattr(variable, "_variable", variable)


def is_here(variable: Any) -> bool:
    """Whether this rank's stage has it."""
    found = plain(variable)
    return found.is_here if isinstance(found, StageVariable) else not getattr(found, "_smp_elsewhere", False)


def is_staged(variable: Any) -> bool:
    """Whether it is of a smp.DistributedModel."""
    return isinstance(plain(variable), StageVariable) or hasattr(plain(variable), "_smp_elsewhere")


@contextmanager
def undecided(made: list[StageVariable]) -> Iterator[None]:
    """Variables that are created in the default graph are of that kind, and noted in `made`."""

    def create(_: Callable[..., Any], **about: Any) -> StageVariable:
        given = about["initial_value"]
        initial: Callable[[], Any] = given if callable(given) else lambda: given
        kept = {name: about.get(name) for name in _ABOUT}
        if kept["shape"] is None or kept["dtype"] is None:
            with FuncGraph("shape").as_default():
                found = tf.convert_to_tensor(initial(), dtype=kept["dtype"])
            kept["shape"], kept["dtype"] = found.shape, found.dtype
        made.append(StageVariable(initial, **kept))
        return made[-1]

    with tf.variable_creator_scope(create):
        yield
