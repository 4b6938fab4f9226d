"""Traces a model once, in a graph that never runs: which layers it calls, with which tensors, at which cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.profiler.internal import flops_registry  # noqa: F401 (registers what operations cost)
from tensorflow.python.util.deprecation import silence

from smdistributed.modelparallel.backend.exceptions import SMPUnsupportedError
from smdistributed.modelparallel.tensorflow.layer_calls import (
    call_layer,
    masked_tensors,
    observe_calls,
    replace_tensors,
    requested_stage_of,
    tensors_of,
)
from smdistributed.modelparallel.tensorflow.stage_variables import StageVariable, create_stage_variables


@dataclass(eq=False)
class LayerCall:
    layer: Any
    name: str
    """The layer's name after the names of the layers that called it, with dots."""
    requested_stage: int | None
    inputs: list[Any]
    children: list[LayerCall] = field(default_factory=list)
    outputs: Any = None
    tensors: list[Any] = field(default_factory=list)
    """The tensors in `outputs`, then their masks."""
    masked: list[bool] = field(default_factory=list)
    operations: range = range(0)
    """The numbers of its operations in the graph."""
    is_indivisible: bool = False
    """Whether it cannot be split: it calls layers inside loops or branches."""


@dataclass(frozen=True)
class ModelTrace:
    model: Any
    graph: FuncGraph
    calls: list[LayerCall]
    """The calls that the model makes itself."""
    outputs: Any
    created: list[StageVariable]
    """The variables that were created during the trace."""

    def variables_used_by(self, call: LayerCall) -> list[Any]:
        """Returns the variables that a call reads: the layer's own, and others."""
        outer = {id(inner): handle for handle, inner in self.graph.captures}
        inputs = [tensor for operation in self._operations(call) for tensor in operation.inputs]
        return variables_of(outer[id(tensor)] for tensor in inputs if id(tensor) in outer)

    def flops(self, call: LayerCall) -> float:
        """Returns the floating point operations of a call, as far as TensorFlow knows them."""
        return sum(self._flops(operation) for operation in self._operations(call))

    def activation_bytes(self, call: LayerCall) -> float:
        """Returns the bytes of the float outputs: the most that is kept for backward. Unknown shapes count 0."""
        outputs = [tensor for operation in self._operations(call) for tensor in operation.outputs]
        floats = [tensor for tensor in outputs if tensor.dtype.is_floating]
        return float(sum((tensor.shape.num_elements() or 0) * tensor.dtype.size for tensor in floats))

    def _operations(self, call: LayerCall) -> Sequence[Any]:
        found: Sequence[Any] = self.graph.get_operations()[call.operations.start : call.operations.stop]
        return found

    def _flops(self, operation: Any) -> float:
        try:
            with silence():  # TensorFlow's own functions for it are deprecated ones
                found: float | None = ops.get_stats_for_node_def(self.graph, operation.node_def, "flops").value
        except ValueError:  # the shape is not known
            found = None
        return found or 0.0


def trace_model(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], is_split: bool) -> ModelTrace:
    """Calls a model in a graph of its own, with placeholders. The variables that it creates get no value yet.

    Raises SMPUnsupportedError if the model is split, and calls layers in loops or branches.
    """
    created: list[StageVariable] = []
    with tf.init_scope(), create_stage_variables(created):
        graph = FuncGraph("smp_trace")
        with graph.as_default(), create_stage_variables(created):
            given = [tf.compat.v1.placeholder(tensor.dtype, tensor.shape) for tensor in tensors_of((args, kwargs))]
            args, kwargs = replace_tensors((args, kwargs), given)
            recorder = _CallRecorder(graph, is_split)
            with observe_calls(recorder):
                outputs = call_layer(model, args, kwargs)
    return ModelTrace(model, graph, recorder.root.children, outputs, created)


def variables_of(handles: Iterable[Any]) -> list[Any]:
    """Returns the live variables that own these resource handles."""
    references = [getattr(handle, "_parent_trackable", None) for handle in handles]
    found = [reference() for reference in references if reference is not None]
    return [variable for variable in found if isinstance(variable, tf.Variable)]


def nested_call_error(what: str) -> SMPUnsupportedError:
    """Returns the error for a call that is not made in the graph of the step itself."""
    return SMPUnsupportedError(
        f"{what} is called inside a loop, a branch or a tf.function of the step, where stages cannot meet. Fix: call "
        "it in the function under smp.step itself, or have the loop inside a layer."
    )


class _CallRecorder:
    """Observes the calls of a trace: records each call of a layer, with its tensors, below the call that makes it."""

    def __init__(self, graph: FuncGraph, is_split: bool) -> None:
        self._graph, self._is_split = graph, is_split
        self.root = LayerCall(None, "", None, [])
        self._open = [self.root]

    def call(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Records a call below the layer that makes it. Its outputs are copied, so each tensor has one producer.

        In another graph, such as a loop's body, it marks the open calls as indivisible instead. There it raises
        SMPUnsupportedError if the model itself would be split.
        """
        if tf.compat.v1.get_default_graph() is not self._graph:
            if len(self._open) == 1 and self._is_split:
                raise nested_call_error(f"Layer {layer.name!r}")
            for call in self._open:
                call.is_indivisible = True
            return call_layer(layer, args, kwargs)
        parent, stage = self._open[-1], requested_stage_of(layer)
        call = LayerCall(
            layer,
            f"{parent.name}.{layer.name}".lstrip("."),
            parent.requested_stage if stage is None else stage,
            tensors_of((args, kwargs)),
        )
        parent.children.append(call)
        self._open.append(call)
        begin = self._graph.version
        try:
            outputs = call_layer(layer, args, kwargs)
        finally:
            self._open.pop()
        # New tensors: a layer may return its input, and each tensor must have one producer.
        call.outputs = replace_tensors(outputs, [tf.identity(tensor) for tensor in tensors_of(outputs)])
        call.tensors, call.masked = tensors_of(call.outputs), masked_tensors(call.outputs)
        call.operations = range(begin, self._graph.version)
        return call.outputs
