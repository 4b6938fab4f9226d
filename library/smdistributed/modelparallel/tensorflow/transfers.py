"""Plans transfers: which outputs of layers must go to which other stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from smdistributed.modelparallel.backend.exceptions import SMPUnsupportedError
from smdistributed.modelparallel.tensorflow.layer_calls import tensors_of
from smdistributed.modelparallel.tensorflow.model_trace import LayerCall, ModelTrace, variables_of
from smdistributed.modelparallel.tensorflow.partition import StageAssignment
from smdistributed.modelparallel.tensorflow.step_messages import Transfer

# Operations without a lasting effect, by the beginnings of their names.
_RANDOM = ("Random", "Multinomial", "TruncatedNormal", "Stateful")


@dataclass(frozen=True)
class PlacedCall:
    call: LayerCall
    stage: int
    transfers: tuple[tuple[Transfer, ...], ...]
    """For each of its tensors, the transfers to other stages."""


@dataclass(frozen=True)
class TransferPlan:
    calls: tuple[PlacedCall, ...]
    """In the order in which the model makes them."""
    split_layers: frozenset[int]
    """The layers around them, which are on several stages, by `id`."""
    outputs: Any
    """The model's outputs. They are computed on `output_stage`, and go to all other stages."""
    output_stage: int
    output_transfers: tuple[tuple[Transfer, ...], ...]


def plan_transfers(trace: ModelTrace, stages: StageAssignment, count: int) -> TransferPlan:
    """Raises SMPUnsupportedError if a layer's variable is used outside of it, or a layer that is split adds losses."""
    split_layers = list(_split_layers(trace.calls, stages))
    if count > 1:
        _reject_losses([trace.model, *split_layers])
    calls = list(_calls_with_stages(trace.calls, stages))
    needs = _NeededOutputs(calls, trace, count)
    for call, stage in calls:
        needs.add(call.inputs, stage)
    needs.add(_inputs_of_side_effects(trace, [call for call, _ in calls]), *range(count))
    outputs = tensors_of(trace.outputs)
    output_stage = needs.stage_of(outputs)
    needs.add(outputs, output_stage)
    numbers = iter(range(1 << 30))

    def transfers(source: int, targets: Iterable[int], what: str) -> tuple[Transfer, ...]:
        return tuple(Transfer(next(numbers), source, target, what) for target in sorted(targets))

    placed = [
        PlacedCall(
            call,
            stage,
            tuple(
                transfers(stage, needs.stages[place, output] - {stage}, f"output {output} of {call.name}")
                for output in range(len(call.tensors))
            ),
        )
        for place, (call, stage) in enumerate(calls)
    ]
    others = set(range(count)) - {output_stage}
    ends = tuple(transfers(output_stage, others, f"output {place} of the model") for place in range(len(outputs)))
    return TransferPlan(tuple(placed), frozenset(map(id, split_layers)), trace.outputs, output_stage, ends)


def _calls_with_stages(calls: Iterable[LayerCall], stages: StageAssignment) -> Iterator[tuple[LayerCall, int]]:
    """Yields calls that run on one stage, with it: calls on several stages are replaced by the calls inside."""
    for call in calls:
        stage = stages.stage_of(call)
        if stage is None:
            yield from _calls_with_stages(call.children, stages)
        else:
            yield call, stage


def _split_layers(calls: Iterable[LayerCall], stages: StageAssignment) -> Iterator[Any]:
    for call in calls:
        if stages.stage_of(call) is None:
            yield call.layer
            yield from _split_layers(call.children, stages)


def _reject_losses(layers: Iterable[Any]) -> None:
    for layer in layers:
        if layer._eager_losses or layer._losses:
            raise SMPUnsupportedError(
                f"{layer.name!r} adds a loss and is cut, so that the loss is on no stage. Fix: call add_loss() in a "
                "layer that is on one stage, or return the inputs of the loss."
            )


def _inputs_of_side_effects(trace: ModelTrace, calls: Sequence[LayerCall]) -> list[Any]:
    """Every rank runs these operations. Random operations, and operations on resources, do not count."""
    inside = {number for call in calls for number in call.operations}
    return [
        tensor
        for number, operation in enumerate(trace.graph.get_operations())
        if number not in inside and operation.op_def is not None and operation.op_def.is_stateful
        if not operation.type.startswith(_RANDOM) and all(given.dtype.name != "resource" for given in operation.inputs)
        for tensor in operation.inputs
    ]


class _NeededOutputs:
    """Collects which stages need which tensors: `stages`, by the place of a call and the place of a tensor in it."""

    def __init__(self, calls: Sequence[tuple[LayerCall, int]], trace: ModelTrace, count: int) -> None:
        self._calls, self._count = calls, count
        self._producers = {
            tensor.ref(): (place, output)
            for place, (call, _) in enumerate(calls)
            for output, tensor in enumerate(call.tensors)
        }
        self._captured = {inner.ref(): outer for outer, inner in trace.graph.captures}
        self.stages: dict[tuple[int, int], set[int]] = {key: set() for key in self._producers.values()}

    def add(self, tensors: Iterable[Any], *stages: int) -> None:
        """Notes that these stages need all outputs of calls from which the tensors are computed."""
        for key in self._outputs_behind(tensors):
            self.stages[key].update(stages)

    def stage_of(self, tensors: Iterable[Any]) -> int:
        """Returns the stage that computes tensors: the stage of the last layer with outputs that go into them."""
        last = max((place for place, _ in self._outputs_behind(tensors)), default=None)
        return 0 if last is None else self._calls[last][1]

    def _outputs_behind(self, tensors: Iterable[Any]) -> set[tuple[int, int]]:
        """Returns outputs of calls as (place, output). Rejects a layer's variable that is used outside of its layer."""
        found, seen, rest = set(), set(), list(tensors)
        while rest:
            tensor = rest.pop()
            if tensor.ref() in seen:
                continue
            seen.add(tensor.ref())
            if tensor.ref() in self._producers:
                found.add(self._producers[tensor.ref()])
                continue
            if self._count > 1 and tensor.dtype.name == "resource" and tensor.ref() in self._captured:
                self._reject(self._captured[tensor.ref()])
            rest.extend(tensor.op.inputs)
        return found

    def _reject(self, handle: Any) -> None:
        name = next((variable.name for variable in variables_of([handle])), "a variable").partition(":")[0]
        raise SMPUnsupportedError(
            f"The model's call() uses the variable {name} outside of the layer that has it, so that it is on no stage. "
            "Fix: use it in the call() of a layer."
        )
