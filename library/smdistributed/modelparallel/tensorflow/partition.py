"""Which stage has which layer: those that the script says, and the others so that the stages cost the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from smdistributed.modelparallel.backend.balance import cut
from smdistributed.modelparallel.backend.config import Config
from smdistributed.modelparallel.backend.exceptions import SMPConfigError
from smdistributed.modelparallel.backend.partition import Partition, shares
from smdistributed.modelparallel.tensorflow.trace import LayerCall, Trace
from smdistributed.modelparallel.tensorflow.variables import plain

_STATE_BYTES = 4  # per byte of a weight: itself, its gradient, and two moments of Adam


@dataclass
class _Item:
    """A layer that is on one stage, as a whole."""

    layer: Any
    name: str
    pin: int | None
    calls: list[LayerCall] = field(default_factory=list)
    used: set[int] = field(default_factory=set)

    @property
    def variables(self) -> set[int]:
        """Its own, and those of others that it uses."""
        return {id(plain(variable)) for variable in self.layer.variables} | self.used

    @property
    def weight_bytes(self) -> float:
        return sum(float(weight.shape.num_elements() * weight.dtype.size) for weight in self.layer.variables)


class Stages:
    """The stage of every layer that has been decided."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._stages: dict[int, int] = {}
        self._variables: dict[int, int] = {}

    def of(self, call: LayerCall) -> int | None:
        """The stage on which a call is made as a whole; None: it is cut."""
        if not is_cut(call):
            return self._stages[id(call.layer)]
        found = {self.of(child) for child in call.children}
        return found.pop() if len(found) == 1 else None

    def has(self, variable: Any, stage: int) -> bool:
        """Whether a variable has its value on that stage: those of no layer are on all."""
        return self._variables.get(id(plain(variable)), stage) == stage

    def decide(self, found: Trace) -> Partition | None:
        """Decide for the layers of a trace for which it has not been; None: for all it has.

        Raises SMPConfigError for a stage that there is not, and for a model with fewer layers than stages.
        """
        items = [item for item in _items(found) if id(item.layer) not in self._stages]
        if not items:
            return None
        costs = _costs(items, found, self._config)
        groups = _together(items)
        partition = self._decide_first(items, costs, groups) if not self._stages else self._decide_later(items)
        for item in items:
            stage = self._stages[id(item.layer)] = partition.stages[item.name]
            self._variables.update(dict.fromkeys(item.variables, stage))
        return partition

    def _decide_first(self, items: Sequence[_Item], costs: Sequence[float], groups: list[list[int]]) -> Partition:
        count, config = self._config.partitions, self._config
        names = [item.name for item in items]
        gap = 1.0
        if all(item.pin is not None for item in items):
            stages: Sequence[int] = [0] * len(items)
        elif not config.auto_partition:
            stages = [config.default_partition] * len(items)
        else:
            found = cut(costs, names, groups, count)
            stages, gap = found.stages, found.largest / (found.optimum or 1)
        stages = [stage if item.pin is None else _checked(item, count) for item, stage in zip(items, stages)]
        _refuse_torn(items, stages, groups)
        return Partition(_with_containers(dict(zip(names, stages))), shares(costs, stages, count), gap)

    def _decide_later(self, items: Sequence[_Item]) -> Partition:
        """Layers that the first trace has not called: with those whose variables they use, else on the last stage,
        where the model ends."""
        count = self._config.partitions
        last = [next((self._variables[v] for v in item.variables if v in self._variables), count - 1) for item in items]
        stages = [stage if item.pin is None else _checked(item, count) for item, stage in zip(items, last)]
        return Partition({item.name: stage for item, stage in zip(items, stages)}, (0.0,) * count, 1.0)


def is_cut(call: LayerCall) -> bool:
    """Whether a call may be cut: what it does itself is done wherever it is needed. Not so where the layer has
    weights, calls layers in loops or branches, or was put on a stage."""
    layer = call.layer
    own = [*layer._trainable_weights, *layer._non_trainable_weights]
    if own or call.is_whole or not call.children:
        return False
    return call.pin is None or any(pin != call.pin for pin in _pins(call))


def _pins(call: LayerCall) -> Iterator[int | None]:
    for child in call.children:
        yield child.pin
        yield from _pins(child)


def _items(found_in: Trace) -> list[_Item]:
    """Layers that cannot be cut, in the order of their first calls."""
    found: dict[int, _Item] = {}
    for call in _wholes(found_in.calls):
        item = found.setdefault(id(call.layer), _Item(call.layer, call.name, call.pin))
        item.calls.append(call)
        item.used |= set(map(id, found_in.captured(call)))
    names: dict[str, int] = defaultdict(int)
    for item in found.values():  # different layers may have one name
        names[item.name] += 1
        if names[item.name] > 1:
            item.name = f"{item.name}_{names[item.name]}"
    return list(found.values())


def _wholes(calls: Iterable[LayerCall]) -> Iterator[LayerCall]:
    for call in calls:
        if is_cut(call):
            yield from _wholes(call.children)
        else:
            yield call


def _costs(items: Sequence[_Item], found: Trace, config: Config) -> list[float]:
    """Memory and operations of each, as shares, weighed by `memory_weight`."""
    active = min(config.active_microbatches, config.microbatches)
    seen: set[int] = set()
    memory = []
    for item in items:
        kept = 0.0 if item.variables & seen else item.weight_bytes * _STATE_BYTES
        seen |= item.variables
        memory.append(kept + active * sum(found.activation_bytes(call) for call in item.calls))
    flops = [sum(found.flops(call) for call in item.calls) for item in items]
    weight = config.memory_weight if sum(flops) else 1.0
    total_memory, total_flops = sum(memory) or 1, sum(flops) or 1
    return [weight * m / total_memory + (1 - weight) * f / total_flops for m, f in zip(memory, flops)]


def _together(items: Sequence[_Item]) -> list[list[int]]:
    """Places of items that have variables in common."""
    groups: list[tuple[set[int], list[int]]] = []
    for place, item in enumerate(items):
        variables, places = item.variables, [place]
        for group in [group for group in groups if group[0] & variables]:
            groups.remove(group)
            variables, places = variables | group[0], [*group[1], *places]
        groups.append((variables, places))
    return [sorted(places) for _, places in groups if len(places) > 1]


def _with_containers(stages: dict[str, int]) -> dict[str, int]:
    """With the layers that are cut, or have all of theirs on one stage: on the first stage of what is in them."""
    found: dict[str, int] = {}
    for name, stage in stages.items():
        parts = name.split(".")
        for container in (".".join(parts[:depth]) for depth in range(1, len(parts))):
            found[container] = min(stage, found.get(container, stage))
        found[name] = stage
    return found


def _checked(item: _Item, count: int) -> int:
    assert item.pin is not None
    if not 0 <= item.pin < count:
        raise SMPConfigError(
            f"smp.partition({item.pin}) puts layer {item.name!r} on a stage that there is not: 'partitions' is "
            f"{count}, they count from 0."
        )
    return item.pin


def _refuse_torn(items: Sequence[_Item], stages: Sequence[int], groups: list[list[int]]) -> None:
    for group in groups:
        if len({stages[place] for place in group}) > 1:
            names = ", ".join(f"{items[place].name!r} on stage {stages[place]}" for place in group)
            raise SMPConfigError(f"Layers with common variables must be on one stage: {names}.")
