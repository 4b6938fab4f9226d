"""The parts of a model and of its optimizer that a rank writes into a partial checkpoint, and reads from one.

Each tensor has its name and its place in the whole one, so that any layout reads the files of any other. A rank writes
its own tensors, and gathers nothing. Of ranks that have the same tensor, the first writes it. A rank reads the bytes of
its own parts alone, into the memory of its own tensors.

Other values, such as the optimizer's options, are one entry `#rest`: an object written by torch.save.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from smdistributed.modelparallel.backend.api import rdp_rank, tp_rank
from smdistributed.modelparallel.backend.exceptions import SMPRuntimeError
from smdistributed.modelparallel.torch.nn.module import split_of
from smdistributed.modelparallel.torch.script.checkpoint_files import load_object
from smdistributed.modelparallel.torch.script.gradients import local_part
from smdistributed.modelparallel.torch.script.model import DistributedModel, script_model
from smdistributed.modelparallel.torch.script.model_parts import (
    aliases_of,
    check_keys,
    is_loaded_plainly,
    load_local,
    select_local,
)
from smdistributed.modelparallel.torch.script.optimizer import DistributedOptimizer
from smdistributed.modelparallel.torch.script.sharding import has_parts, make_whole, region_of, wrap_like
from smdistributed.modelparallel.torch.script.state import state
from smdistributed.modelparallel.torch.script.tensor_files import Region, TensorFiles, damaged, write_tensors

_REST = "#rest"
_STATE, _COPY = "state", "copy"


# --- writing


def write_model(model: DistributedModel, path: Path) -> None:
    """Writes this rank's part of a model, if it is the first that has it. A shared parameter is written once.

    A shared buffer is written by each name: its modules may be on different stages when it is read.
    """
    tensors: dict[str, tuple[torch.Tensor, Region]] = {}
    rest: dict[str, Any] = {}
    seen: set[int] = set()
    for key, value in select_local(model.manager, keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            rest[key] = value
        elif not isinstance(value, nn.Parameter) or id(value) not in seen:
            seen.add(id(value))
            _add(tensors, key, value, region_of(value), 0, split_of(value) is not None)
    _write(path, tensors, {"values": rest} if rest and rdp_rank() == tp_rank() == 0 else {})


def write_optimizer(optimizer: DistributedOptimizer, path: Path) -> None:
    """Writes this rank's part of an optimizer. All ranks call it: norms of sharded tensors are sums over ranks."""
    tensors: dict[str, tuple[torch.Tensor, Region]] = {}
    rest: dict[str, Any] = {}
    local, names = optimizer.local_parts(), _parameter_names(optimizer)
    parameters = optimizer.master_weights.parameters()
    other = {key: local["state"].pop(key) for key in [key for key in local["state"] if key not in names]}
    for number, values in local["state"].items():
        name, parameter = names[number], parameters[number]
        if not isinstance(values, Mapping):
            rest[name] = values
            continue
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                value = value if has_parts(value) else make_whole(value)
                is_alike = has_parts(value) if has_parts(parameter) else value.shape == parameter.shape
                region = region_of(parameter) if is_alike else Region.of_whole(value.shape)
                is_share, owner = is_alike and split_of(parameter) is not None, optimizer.owner_of(parameter)
                _add(tensors, f"{_STATE}/{key}/{name}", value, region, owner, is_share)
            else:
                rest.setdefault(name, {})[key] = tree_map(make_whole, value)
    for number, value in local["masters"].items():
        parameter = parameters[number]
        is_share, owner = split_of(parameter) is not None, optimizer.owner_of(parameter)
        _add(tensors, f"{_COPY}//{names[number]}", value, region_of(parameter), owner, is_share)
    options = {key: local[key] for key in ("param_groups", "loss_scale")}
    is_first = rdp_rank() == tp_rank() == 0
    _write(path, tensors, {**options, "state": rest, "other": other} if tensors or is_first else {})


def _add(
    tensors: dict[str, tuple[torch.Tensor, Region]],
    key: str,
    value: torch.Tensor,
    region: Region,
    owner: int,
    is_share: bool,
) -> None:
    """Adds a tensor to write, unless another rank has the same. `owner`: the first replica that has it.

    `is_share`: whether each rank of TP_GROUP has another part.
    """
    replica = rdp_rank() // state.cfg.sharded_data_parallel_degree
    is_first = 0 not in region.shape if region.is_part else rdp_rank() == owner
    if replica == owner and is_first and (is_share or tp_rank() == 0):
        tensors[key] = local_part(value), region


def _write(path: Path, tensors: dict[str, tuple[torch.Tensor, Region]], rest: Mapping[str, Any]) -> None:
    if rest:
        stream = io.BytesIO()
        torch.save(dict(rest), stream)
        packed = torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)
        tensors[_REST] = packed, Region.of_whole(packed.shape)
    if tensors:
        write_tensors(path, tensors)


# --- reading


def read_model(model: DistributedModel, files: TensorFiles, strict: bool, weights_only: bool | None) -> None:
    """Reads this rank's part of a model. Raises RuntimeError as `DistributedModel.load_state_dict` does."""
    manager, aliases = model.manager, aliases_of(model.manager.root)
    rest = {key: value for part in _read_rest(files, weights_only, "values") for key, value in part["values"].items()}
    check_keys(manager, {*files, *rest} - {_REST}, strict)
    read: set[int] = set()
    for key, target in select_local(manager, keep_vars=True).items():
        name = next((name for name in aliases.get(key, (key,)) if name in files), None)
        if name is None or not isinstance(target, torch.Tensor) or id(target) in read:
            continue
        read.add(id(target))
        region = region_of(target)
        if files.shape(name) != region.whole:
            raise RuntimeError(
                f"load_state_dict: {key} has shape {files.shape(name)} in the checkpoint, and {region.whole} in the "
                "model. Fix: make the model as in the job that saved it."
            )
        if is_loaded_plainly(manager.root, key):
            files.read(name, local_part(target.detach()), region)
        else:
            rest[key] = _read_like(files, name, target, region)
    if rest:
        load_local(manager, rest, strict=False)
    model.refresh_copies()


def read_optimizer(
    optimizer: DistributedOptimizer, files: TensorFiles, masters_only: bool, weights_only: bool | None
) -> None:
    """Reads this rank's part of an optimizer, after its model. `masters_only`: no state of the wrapped optimizer."""
    parts = _read_rest(files, weights_only, "loss_scale", "other", "param_groups", "state")
    if not parts:
        raise SMPRuntimeError(f"No file of the optimizer has {_REST}. Fix: copy the files of all hosts there.")
    weights = optimizer.master_weights
    weights.scale.load_state_dict(parts[0]["loss_scale"])
    weights.make_copies()
    numbers = {name: number for number, name in _parameter_names(optimizer).items()}
    own = dict(optimizer.own_parameters())
    found: dict[Any, Any] = dict(parts[0]["other"])
    for key in files:
        kind, _, rest = key.partition("/")
        field, _, name = rest.partition("/")
        number = numbers.get(name, -1)
        if number not in own or (masters_only and kind == _STATE):
            continue
        value = _read_like(files, key, own[number], region_of(own[number]))
        if kind == _COPY:
            weights.load_values({number: value})
        else:
            found.setdefault(number, {})[field] = value
    if not masters_only:
        for name, values in ((name, values) for part in parts for name, values in part["state"].items()):
            if numbers.get(name) in own:
                number, is_dict = numbers[name], isinstance(values, Mapping)
                found[number] = {**found.get(number, {}), **values} if is_dict else values
        optimizer.optimizer.load_state_dict({"state": found, "param_groups": parts[0]["param_groups"]})


def _read_like(files: TensorFiles, name: str, target: Any, region: Region) -> Any:
    """Reads a tensor as `target` is split, if the whole one has its shape; else all of it."""
    shape, device = files.shape(name), local_part(target).device
    if shape != region.whole:
        region, target, device = Region.of_whole(shape), None, torch.device("cpu")
    read = torch.empty(region.shape, dtype=files.dtype(name), device=device)
    files.read(name, read, region)
    return wrap_like(read, target)


def _read_rest(files: TensorFiles, weights_only: bool | None, *keys: str) -> list[Any]:
    """Returns the objects of all files, which have these keys.

    Raises SMPRuntimeError if one lacks a key, or holds more than `weights_only` allows.
    """
    parts = []
    for path, content in files.read_bytes(_REST):
        part = load_object(io.BytesIO(content), path, weights_only, map_location="cpu")
        if not (isinstance(part, Mapping) and part.keys() >= set(keys)):
            raise damaged(path, f"{_REST} lacks one of {', '.join(keys)}")
        parts.append(part)
    return parts


def _parameter_names(optimizer: DistributedOptimizer) -> dict[int, str]:
    """Returns names by the numbers in the optimizer. A parameter that is not in the model has its number as name."""
    weights = optimizer.master_weights
    names = {id(parameter): name for name, parameter in script_model(state).named_parameters()}
    originals = weights.model_parameters(weights.parameters())
    return {number: names.get(id(parameter), str(number)) for number, parameter in enumerate(originals)}
