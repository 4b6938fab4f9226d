"""What a model calls, in a graph that is never run: which layers, with which tensors, at which cost."""

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
from smdistributed.modelparallel.tensorflow.layers import masked, observed, pin_of, run, tensors_of, with_tensors
from smdistributed.modelparallel.tensorflow.variables import StageVariable, undecided


@dataclass(eq=False)
class LayerCall:
    """A call of a layer. name: of the layer, after those of the layers that called it. tensors: of its outputs.

    is_whole: whether it cannot be cut: it calls layers inside loops or branches.
    """

    layer: Any
    name: str
    pin: int | None
    inputs: list[Any]
    children: list[LayerCall] = field(default_factory=list)
    outputs: Any = None
    tensors: list[Any] = field(default_factory=list)
    masked: list[bool] = field(default_factory=list)
    operations: range = range(0)
    is_whole: bool = False


@dataclass(frozen=True)
class Trace:
    """calls: those that the model makes itself. made: the variables that were created meanwhile."""

    model: Any
    graph: FuncGraph
    calls: list[LayerCall]
    outputs: Any
    made: list[StageVariable]

    def captured(self, call: LayerCall) -> list[Any]:
        """The variables that a call uses."""
        outer = {id(inner): handle for handle, inner in self.graph.captures}
        inputs = [tensor for operation in self._operations(call) for tensor in operation.inputs]
        return variables_of(outer[id(tensor)] for tensor in inputs if id(tensor) in outer)

    def flops(self, call: LayerCall) -> float:
        """Of a call, as far as TensorFlow knows."""
        return sum(self._flops(operation) for operation in self._operations(call))

    def activation_bytes(self, call: LayerCall) -> float:
        """What a call leaves for the backward pass, at most."""
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
        except ValueError:  # of a shape that is not known
            found = None
        return found or 0.0


def trace(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], is_cut: bool) -> Trace:
    """Call a model with tensors like these. Variables that it creates are undecided.

    Raises SMPUnsupportedError where it is to be cut, and calls layers in loops or branches.
    """
    made: list[StageVariable] = []
    with tf.init_scope(), undecided(made):
        graph = FuncGraph("smp_trace")
        with graph.as_default(), undecided(made):
            given = [tf.compat.v1.placeholder(tensor.dtype, tensor.shape) for tensor in tensors_of((args, kwargs))]
            args, kwargs = with_tensors((args, kwargs), given)
            recorder = _Recorder(graph, is_cut)
            with observed(recorder):
                outputs = run(model, args, kwargs)
    return Trace(model, graph, recorder.root.children, outputs, made)


def variables_of(handles: Iterable[Any]) -> list[Any]:
    """The variables that are alive and have one of these handles."""
    references = [getattr(handle, "_parent_trackable", None) for handle in handles]
    found = [reference() for reference in references if reference is not None]
    return [variable for variable in found if isinstance(variable, tf.Variable)]


def elsewhere(what: str) -> SMPUnsupportedError:
    """What is raised for calls that are not made in the graph of the step itself."""
    return SMPUnsupportedError(
        f"{what} is called inside a loop, a branch or a tf.function of the step, where stages cannot meet: call it in "
        "the function under smp.step itself, or have the loop inside a layer."
    )


class _Recorder:
    def __init__(self, graph: FuncGraph, is_cut: bool) -> None:
        self._graph, self._is_cut = graph, is_cut
        self.root = LayerCall(None, "", None, [])
        self._open = [self.root]

    def call(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if tf.compat.v1.get_default_graph() is not self._graph:
            if len(self._open) == 1 and self._is_cut:
                raise elsewhere(f"Layer {layer.name!r}")
            for call in self._open:
                call.is_whole = True
            return run(layer, args, kwargs)
        parent = self._open[-1]
        pin = pin_of(layer)
        call = LayerCall(
            layer,
            f"{parent.name}.{layer.name}".lstrip("."),
            parent.pin if pin is None else pin,
            tensors_of((args, kwargs)),
        )
        parent.children.append(call)
        self._open.append(call)
        begin = self._graph.version
        try:
            outputs = run(layer, args, kwargs)
        finally:
            self._open.pop()
        # A tensor of its own, so that of a layer that returns what it was given one knows whose it is.
        call.outputs = with_tensors(outputs, [tf.identity(tensor) for tensor in tensors_of(outputs)])
        call.tensors, call.masked = tensors_of(call.outputs), masked(call.outputs)
        call.operations = range(begin, self._graph.version)
        return call.outputs
