"""Assigns layers to stages: as the script requests, and the others so that stages cost about the same.

Without `auto_partition`, the others are on `default_partition`. In both cases, layers that the first trace did not call
join the layers that own their variables. Without such variables they are on the last stage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from smdistributed.modelparallel.backend.config import Config
from smdistributed.modelparallel.backend.exceptions import SMPConfigError
from smdistributed.modelparallel.backend.partition import (
    STATE_BYTES,
    Partition,
    cut,
    group_overlapping,
    relative_costs,
    shares,
)
from smdistributed.modelparallel.tensorflow.model_trace import LayerCall, ModelTrace
from smdistributed.modelparallel.tensorflow.stage_variables import unwrap


@dataclass
class _WholeLayer:
    layer: Any
    name: str
    requested_stage: int | None
    calls: list[LayerCall] = field(default_factory=list)
    used: set[int] = field(default_factory=set)

    @property
    def variables(self) -> set[int]:
        """Its own variables, and variables of other layers that it uses, by `id`."""
        return {id(unwrap(variable)) for variable in self.layer.variables} | self.used

    @property
    def weight_bytes(self) -> float:
        return sum(float(weight.shape.num_elements() * weight.dtype.size) for weight in self.layer.variables)

    def checked_stage(self, default: int, count: int) -> int:
        """Returns the requested stage, else `default`. Raises SMPConfigError if there is no such stage."""
        stage = self.requested_stage
        if stage is None:
            return default
        if not 0 <= stage < count:
            raise SMPConfigError(
                f"smp.partition({stage}) puts layer {self.name!r} on a stage that does not exist. Allowed: 0 to "
                f"{count - 1}. Fix: name one of these, or raise 'partitions'."
            )
        return stage


class StageAssignment:
    def __init__(self, config: Config) -> None:
        self._config = config
        self._stages: dict[int, int] = {}
        self._variables: dict[int, int] = {}

    def stage_of(self, call: LayerCall) -> int | None:
        """Returns the stage of a call, or None if the call is split over several stages."""
        if not may_be_split(call):
            return self._stages[id(call.layer)]
        found = {self.stage_of(child) for child in call.children}
        return found.pop() if len(found) == 1 else None

    def has(self, variable: Any, stage: int) -> bool:
        """Whether a variable has a value on a stage. Variables that belong to no layer are on all stages."""
        return self._variables.get(id(unwrap(variable)), stage) == stage

    def assign(self, trace: ModelTrace) -> Partition | None:
        """Assigns the traced layers that have no stage yet. Returns their partition; None if all layers have a stage.

        Raises SMPConfigError for a stage that does not exist, for layers with common variables on different stages, and
        for fewer layers than stages.
        """
        layers = [layer for layer in _whole_layers(trace) if id(layer.layer) not in self._stages]
        if not layers:
            return None
        partition = self._assign_first(layers, trace) if not self._stages else self._assign_later(layers)
        for layer in layers:
            stage = self._stages[id(layer.layer)] = partition.stages[layer.name]
            self._variables.update(dict.fromkeys(layer.variables, stage))
        return partition

    def _assign_first(self, layers: Sequence[_WholeLayer], trace: ModelTrace) -> Partition:
        """Requested stages count. Others are cut by cost, or are on `default_partition` without `auto_partition`."""
        count, config = self._config.partitions, self._config
        names, costs = [layer.name for layer in layers], _costs(layers, trace, config)
        groups = group_overlapping([layer.variables for layer in layers])
        gap = 1.0
        if all(layer.requested_stage is not None for layer in layers):
            stages: Sequence[int] = [0] * len(layers)
        elif not config.auto_partition:
            stages = [config.default_partition] * len(layers)
        else:
            found = cut(costs, names, groups, count)
            stages, gap = found.stages, found.largest / (found.optimum or 1)
        stages = [layer.checked_stage(stage, count) for layer, stage in zip(layers, stages)]
        _reject_separated(layers, stages, groups)
        return Partition(_add_containers(dict(zip(names, stages))), shares(costs, stages, count), gap)

    def _assign_later(self, layers: Sequence[_WholeLayer]) -> Partition:
        """Layers join those that own the variables they use, otherwise the last stage, where the model ends."""
        count, stages = self._config.partitions, {}
        for layer in layers:
            known = (self._variables[variable] for variable in layer.variables if variable in self._variables)
            stages[layer.name] = layer.checked_stage(next(known, count - 1), count)
        return Partition(stages, (0.0,) * count, 1.0)


def may_be_split(call: LayerCall) -> bool:
    """Whether a call may be split. Its own computation then runs wherever it is needed.

    Not if the layer has weights, calls layers in loops or branches, or the script requests one stage for all of it.
    """
    layer = call.layer
    own = [*layer._trainable_weights, *layer._non_trainable_weights]
    if own or call.is_indivisible or not call.children:
        return False
    stage = call.requested_stage
    return stage is None or any(other != stage for other in _requested_stages(call))


def _requested_stages(call: LayerCall) -> Iterator[int | None]:
    """Yields the stages that the script requests for all calls inside a call; None: no request."""
    for child in call.children:
        yield child.requested_stage
        yield from _requested_stages(child)


def _whole_layers(trace: ModelTrace) -> list[_WholeLayer]:
    """Returns the layers that cannot be split, by first call. Names that several layers have get a number."""
    found: dict[int, _WholeLayer] = {}
    for call in _whole_calls(trace.calls):
        layer = found.setdefault(id(call.layer), _WholeLayer(call.layer, call.name, call.requested_stage))
        layer.calls.append(call)
        layer.used |= set(map(id, trace.variables_used_by(call)))
    names: dict[str, int] = defaultdict(int)
    for layer in found.values():  # different layers may have one name
        names[layer.name] += 1
        if names[layer.name] > 1:
            layer.name = f"{layer.name}_{names[layer.name]}"
    return list(found.values())


def _whole_calls(calls: Iterable[LayerCall]) -> Iterator[LayerCall]:
    """Yields the calls that are not split, in order: calls that may be split are replaced by the calls inside."""
    for call in calls:
        if may_be_split(call):
            yield from _whole_calls(call.children)
        else:
            yield call


def _costs(layers: Sequence[_WholeLayer], trace: ModelTrace, config: Config) -> list[float]:
    """Returns the costs of layers: memory and operations, by `memory_weight`. Shared variables count once."""
    active = min(config.active_microbatches, config.microbatches)
    seen: set[int] = set()
    memory = []
    for layer in layers:
        kept = 0.0 if layer.variables & seen else layer.weight_bytes * STATE_BYTES
        seen |= layer.variables
        memory.append(kept + active * sum(trace.activation_bytes(call) for call in layer.calls))
    return relative_costs(memory, [sum(map(trace.flops, layer.calls)) for layer in layers], config.memory_weight)


def _add_containers(stages: dict[str, int]) -> dict[str, int]:
    """Returns the stages, with layers that contain others added: each on the first stage of its layers."""
    found: dict[str, int] = {}
    for name, stage in stages.items():
        parts = name.split(".")
        for container in (".".join(parts[:depth]) for depth in range(1, len(parts))):
            found[container] = min(stage, found.get(container, stage))
        found[name] = stage
    return found


def _reject_separated(layers: Sequence[_WholeLayer], stages: Sequence[int], groups: list[list[int]]) -> None:
    for group in groups:
        if len({stages[place] for place in group}) > 1:
            names = ", ".join(f"{layers[place].name!r} on stage {stages[place]}" for place in group)
            raise SMPConfigError(
                f"Layers with common variables must be on one stage: {names}. Fix: request the same stage for all."
            )
