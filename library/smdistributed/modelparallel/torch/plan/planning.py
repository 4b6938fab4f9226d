"""Estimates a configuration for a model without running it: the partition, each stage's memory, and idle time.

The model is constructed and traced on the meta device. Memory counts parameters, gradients, the optimizer's state and
the activations of the microbatches in flight. Time counts operations, and assumes that all devices are equally
fast. Both are estimates: they compare configurations, and do not replace a measurement.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.backend.config import Config, check
from smdistributed.modelparallel.backend.exceptions import SMPConfigError, SMPError
from smdistributed.modelparallel.backend.partition import Partition, assign_owners
from smdistributed.modelparallel.torch.plan.auto_partition import partition
from smdistributed.modelparallel.torch.plan.construction import dtype_of
from smdistributed.modelparallel.torch.plan.trace import Trace, trace

OPTIMIZER_STATES = {"sgd": 0, "momentum": 1, "adam": 2}
"""How many tensors of a parameter's size an optimizer keeps for it."""
_META_FIX = "Fix: make it construct and call the model without reading values of tensors."


@dataclasses.dataclass(frozen=True)
class EstimatedPlan:
    """One configuration, estimated. `idle`: the share of a step in which a device idles, from 0 to 1."""

    config: Config
    partition: Partition
    stage_bytes: tuple[int, ...]
    idle: float

    @property
    def largest(self) -> int:
        return max(self.stage_bytes)


@dataclasses.dataclass(frozen=True)
class PlannedModel:
    """A model on the meta device. `found` is the trace of one call with a batch of size `batch`."""

    module: nn.Module
    batch: int
    found: Trace


def load(factory: str) -> PlannedModel:
    """Constructs a factory's model on the meta device and traces it. A file's directory is put into sys.path.

    `factory`: `FILE.py:NAME` or `MODULE:NAME` of a function that returns `(module, batch)`, `(module, args)` or
    `(module, args, kwargs)`. A batch is a tensor, or a dict of keyword arguments.
    Raises SMPError if there is none, or the model cannot run on the meta device.
    """
    where, _, name = factory.rpartition(":")
    if not where:
        raise SMPError(f"{factory!r} names no factory. Fix: give FILE.py:NAME or MODULE:NAME.")
    function = getattr(_module(where), name, None)
    if not callable(function):
        raise SMPError(f"{where} has no function {name!r}. Fix: name one that returns (module, batch).")
    try:
        with torch.device("meta"):
            made = function()
    except Exception as error:  # the user's code, any reason
        raise SMPError(f"{factory} raised {type(error).__name__} on the meta device: {error}. {_META_FIX}") from error
    module, args, kwargs = _parse_made(factory, made)
    try:
        found = trace(module, args, kwargs)
    except Exception as error:
        raise SMPError(
            f"The model of {factory} cannot run on the meta device, where tensors have no values "
            f"({type(error).__name__}: {error}). {_META_FIX}"
        ) from error
    return PlannedModel(module, _batch((*args, *kwargs.values())), found)


def _parse_made(factory: str, made: Any) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Returns the module, its arguments and its keyword arguments. A dict alone has keyword arguments."""
    module, args, kwargs = (*made, {})[:3] if isinstance(made, tuple) and len(made) > 1 else (made, (), {})
    if isinstance(args, Mapping) and not kwargs:
        args, kwargs = (), dict(args)
    args = args if isinstance(args, tuple) else (args,)
    if not (isinstance(module, nn.Module) and isinstance(kwargs, dict) and (args or kwargs)):
        raise SMPError(
            f"{factory} must return (module, batch), (module, args) or (module, args, kwargs). Fix: make the batch a "
            "tensor or a dict of keyword arguments, args a tuple and kwargs a dict."
        )
    sharded = [name for name, parameter in module.named_parameters() if hasattr(parameter, "device_mesh")]
    if sharded:
        raise SMPError(
            f"{factory} returns a sharded model: {sharded[0]} is a DTensor. Estimates are for models that model "
            "parallelism splits. Fix: return the model before fully_shard or parallelize_module."
        )
    return module, args, kwargs


def plan(model: PlannedModel, config: Config, optimizer: str = "adam", replicas: int = 1) -> EstimatedPlan:
    """Raises SMPConfigError if the model has fewer modules than there are stages, or for tensor parallelism."""
    if config.tensor_parallel_degree > 1:
        raise SMPConfigError(
            "Estimates do not know 'tensor_parallel_degree' above 1. Fix: leave it out, and take the memory of split "
            "modules divided by the degree."
        )
    found = model.found.of_part(config.microbatches)  # the first step of a run would trace one microbatch
    cut = partition(model.module, config, found)
    stages, count = cut.stages, config.partitions
    seen: set[int] = set()
    parameters: list[list[nn.Parameter]] = [[] for _ in range(count)]
    operations, activations = [0.0] * count, [0.0] * count
    for name, part in model.module.named_modules():
        stage = stages[name]
        new = {id(p): p for p in part._parameters.values() if p is not None and id(p) not in seen}
        seen.update(new)
        parameters[stage].extend(new.values())
        operations[stage] += found.operations[name]
        activations[stage] += found.activation_bytes[name]
    kept = [state_bytes(own, config, optimizer, replicas) for own in parameters]
    held = [size * min(config.microbatches, _window(config, stage)) for stage, size in enumerate(activations)]
    return EstimatedPlan(
        config, cut, tuple(int(k + a) for k, a in zip(kept, held)), idle(operations, config.microbatches)
    )


def state_bytes(parameters: Sequence[nn.Parameter], config: Config, optimizer: str, replicas: int = 1) -> int:
    """Counts the bytes of parameters, gradients and the optimizer's state, of the replica that has most.

    Frozen parameters have no gradients and no state. With `fp16` or `bf16` a parameter has two bytes, and a
    single-precision copy with a gradient. With `shard_optimizer_state` a replica has the state of its share, but all
    copies.
    """
    trained = [p for p in parameters if p.requires_grad]
    dtype = dtype_of(config)

    def is_cast(parameter: nn.Parameter) -> bool:
        return dtype is not None and parameter.is_floating_point()

    updated = [p.numel() * (4 if is_cast(p) else p.element_size()) for p in trained]
    copies = sum(2 * size for p, size in zip(trained, updated) if is_cast(p))
    states = [0] * (replicas if config.shard_optimizer_state else 1)
    for size, owner in zip(updated, assign_owners([p.numel() for p in trained], len(states))):
        states[owner] += size * OPTIMIZER_STATES[optimizer]
    own = sum(p.numel() * (2 if is_cast(p) else p.element_size()) for p in (*parameters, *trained))
    return own + copies + max(states)


def idle(stage_times: Sequence[float], microbatches: int) -> float:
    """Estimates the share of a step in which a device idles, from 0 to 1. Stage times may have any unit."""
    whole = sum(stage_times) + (microbatches - 1) * max(stage_times)
    return 1 - microbatches * sum(stage_times) / len(stage_times) / whole if whole else 0.0


def candidates(model: PlannedModel, given: dict[str, Any], devices: int, optimizer: str) -> Iterator[EstimatedPlan]:
    """Yields plans for powers of two of partitions, and for numbers of microbatches that divide the batch.

    It ends where partitions would be more than modules. More than 8 microbatches for each partition are not tried:
    devices would hardly idle less, and small microbatches compute slowly. active_microbatches is the default, or the
    number of partitions: fewer would leave stages idle. With `ddp`, the remaining devices have replicas. Values in
    `given` are not varied. Raises SMPConfigError if they are not allowed, or its partitions are more than the model has
    modules.
    """
    named = [given[name] for name in ("partitions", "pipeline_parallel_degree") if name in given]
    for partitions in named[:1] or _powers(devices):
        for microbatches in [given["microbatches"]] if "microbatches" in given else _splits(model, given, partitions):
            config = check({**given, "partitions": partitions, "microbatches": microbatches})
            tight = dataclasses.replace(config, active_microbatches=partitions)
            free = "active_microbatches" not in given and config.pipeline != "simple" and microbatches > partitions > 1
            replicas = max(1, devices // partitions) if config.ddp else 1
            try:
                yield plan(model, config, optimizer, replicas)
                if free:
                    yield plan(model, tight, optimizer, replicas)
            except SMPConfigError:
                if named:
                    raise
                return  # more partitions than the model has modules


def recommended(plans: Sequence[EstimatedPlan], memory: int | None) -> EstimatedPlan | None:
    """Returns the plan that idles least, of those that fit the fewest devices of `memory` bytes; None if none fits."""
    fitting = [found for found in plans if memory is None or found.largest <= memory]
    fewest = min((found.config.partitions for found in fitting), default=0)
    few = [found for found in fitting if found.config.partitions == fewest]
    return min(few, key=lambda found: (round(found.idle, 3), -found.config.active_microbatches), default=None)


def _window(config: Config, stage: int) -> int:
    return config.microbatches if config.pipeline == "simple" else max(1, config.active_microbatches - stage)


def _batch(given: Sequence[Any]) -> int:
    """Returns the length of axis 0 of the first tensor; 1 if there is none."""
    return next((value.shape[0] for value in given if isinstance(value, torch.Tensor) and value.dim()), 1)


def _splits(model: PlannedModel, given: dict[str, Any], partitions: object) -> list[int]:
    """Without `uneven_microbatches`, these are the largest divisors of the batch up to each power of two."""
    most = min(model.batch, 8 * max(1, partitions)) if isinstance(partitions, int) else 1
    if str(given.get("uneven_microbatches")).lower() == "true":
        return _powers(most)
    divisors = [count for count in range(1, most + 1) if model.batch % count == 0]
    return sorted({max(d for d in divisors if d <= limit) for limit in [*_powers(most), most] if divisors})


def _powers(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length()) if 1 << power <= most]


def _module(where: str) -> Any:
    """Puts a file's directory into sys.path, and its module into sys.modules. Raises SMPError if that fails."""
    path = Path(where)
    if path.suffix == ".py" and not path.is_file():
        raise SMPError(f"There is no file {where}. Fix: give its path, from here or from the root.")
    try:
        if path.suffix != ".py":
            return importlib.import_module(where)
        sys.path.insert(0, str(path.parent.resolve()))
        name = f"{path.stem}_to_plan" if path.stem in sys.modules else path.stem
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # where a dataclass looks for its annotations, and pickle for classes
        spec.loader.exec_module(module)
    except Exception as error:  # the user's code, any reason
        raise SMPError(
            f"{where} cannot be imported: {type(error).__name__}: {error}. Fix: make `python {where}` run."
        ) from error
    return module
