"""Which outputs of layers which stages need, so that each gets those, and no others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from smdistributed.modelparallel.backend.exceptions import SMPUnsupportedError
from smdistributed.modelparallel.tensorflow.layers import tensors_of
from smdistributed.modelparallel.tensorflow.partition import Stages
from smdistributed.modelparallel.tensorflow.program import Transfer
from smdistributed.modelparallel.tensorflow.trace import LayerCall, Trace, variables_of

_RANDOM = ("Random", "Multinomial", "TruncatedNormal", "Stateful")  # begin the names of operations that may be left out


@dataclass(frozen=True)
class Unit:
    """A call of a layer as a whole. transfers: of each of its tensors."""

    call: LayerCall
    stage: int
    transfers: tuple[tuple[Transfer, ...], ...]


@dataclass(frozen=True)
class Flow:
    """units: in the order in which the model calls them. cut: the layers around them, by their ids.
    outputs: of the model; they are computed on output_stage, and go to all others."""

    units: tuple[Unit, ...]
    cut: frozenset[int]
    outputs: Any
    output_stage: int
    output_transfers: tuple[tuple[Transfer, ...], ...]


def flow(found: Trace, stages: Stages, count: int) -> Flow:
    """What goes from stage to stage in a call of the model that was traced.

    Raises SMPUnsupportedError where a variable of a layer is used outside of it, and where what is cut adds losses.
    """
    cut = list(_cut(found.calls, stages))
    if count > 1:
        _refuse_losses([found.model, *cut])
    calls = list(_units(found.calls, stages))
    needs = _Needs(calls, found, count)
    for call, stage in calls:
        needs.add(call.inputs, stage)
    needs.add(_effects(found, [call for call, _ in calls]), *range(count))
    outputs = tensors_of(found.outputs)
    output_stage = needs.stage_of(outputs)
    needs.add(outputs, output_stage)
    numbers = iter(range(1 << 30))

    def transfers(source: int, targets: Iterable[int], what: str) -> tuple[Transfer, ...]:
        return tuple(Transfer(next(numbers), source, target, what) for target in sorted(targets))

    units = [
        Unit(
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
    return Flow(tuple(units), frozenset(map(id, cut)), found.outputs, output_stage, ends)


def _units(calls: Iterable[LayerCall], stages: Stages) -> Iterator[tuple[LayerCall, int]]:
    for call in calls:
        stage = stages.of(call)
        if stage is None:
            yield from _units(call.children, stages)
        else:
            yield call, stage


def _cut(calls: Iterable[LayerCall], stages: Stages) -> Iterator[Any]:
    """The layers of calls that are on no stage as a whole."""
    for call in calls:
        if stages.of(call) is None:
            yield call.layer
            yield from _cut(call.children, stages)


def _refuse_losses(layers: Iterable[Any]) -> None:
    for layer in layers:
        if layer._eager_losses or layer._losses:
            raise SMPUnsupportedError(
                f"{layer.name!r} adds a loss and is cut, so that the loss is on no stage: call add_loss() in a layer "
                "that is on one stage, or return what the loss is computed from."
            )


def _effects(found: Trace, calls: Sequence[LayerCall]) -> list[Any]:
    """What operations outside of layers take that are there for their effects: they are done on every rank."""
    inside = {number for call in calls for number in call.operations}
    return [
        tensor
        for number, operation in enumerate(found.graph.get_operations())
        if number not in inside and operation.op_def is not None and operation.op_def.is_stateful
        if not operation.type.startswith(_RANDOM) and all(given.dtype.name != "resource" for given in operation.inputs)
        for tensor in operation.inputs
    ]


class _Needs:
    """stages: those that need a tensor, by the place of its call and its own among the call's."""

    def __init__(self, calls: Sequence[tuple[LayerCall, int]], found: Trace, count: int) -> None:
        self._calls, self._count = calls, count
        self._producers = {
            tensor.ref(): (place, output)
            for place, (call, _) in enumerate(calls)
            for output, tensor in enumerate(call.tensors)
        }
        self._captured = {inner.ref(): outer for outer, inner in found.graph.captures}
        self.stages: dict[tuple[int, int], set[int]] = {key: set() for key in self._producers.values()}

    def add(self, tensors: Iterable[Any], *stages: int) -> None:
        """These stages need these tensors."""
        for key in self._reached(tensors):
            self.stages[key].update(stages)

    def stage_of(self, tensors: Iterable[Any]) -> int:
        """Where they are computed: on the stage of the last layer whose outputs go into them."""
        last = max((place for place, _ in self._reached(tensors)), default=None)
        return 0 if last is None else self._calls[last][1]

    def _reached(self, tensors: Iterable[Any]) -> set[tuple[int, int]]:
        """The outputs of calls from which these are computed without another call."""
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
                self._refuse(self._captured[tensor.ref()])
            rest.extend(tensor.op.inputs)
        return found

    def _refuse(self, handle: Any) -> None:
        name = next((variable.name for variable in variables_of([handle])), "a variable").partition(":")[0]
        raise SMPUnsupportedError(
            f"The model's call() uses the variable {name} outside of the layer that has it, so that it is on no stage: "
            "use it in the call() of a layer."
        )
