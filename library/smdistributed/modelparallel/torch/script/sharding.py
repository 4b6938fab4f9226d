"""Sharded data parallelism (AWS API 1.11), by torch's FSDP2: each rank holds a part of every parameter.

The ranks are a mesh of replicas × shards. A unit, about a layer, is gathered before it computes, and freed after. Its
gradients are reduced to averages over all ranks, of which each rank gets its part, after every microbatch. Parameters,
gradients and the optimizer's state are DTensors that are split along axis 0. "MiCS", arXiv 2205.00119, describes the
layout that AWS has published.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map

from smdistributed.modelparallel.backend.exceptions import SMPUnsupportedError, StepUsageError
from smdistributed.modelparallel.torch.nn.module import copy_split, split_of, take_share
from smdistributed.modelparallel.torch.nn.tensor_group import tensor_group
from smdistributed.modelparallel.torch.pipeline.module_manager import ModuleManager
from smdistributed.modelparallel.torch.script.state import TorchState
from smdistributed.modelparallel.torch.script.tensor_files import Region

try:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate
except ImportError:  # torch before 2.6
    DTensor = fully_shard = None  # type: ignore[assignment,misc]

_PART = "_smp_part"
"""The only key of a dict that stands in a checkpoint for this rank's part of a tensor."""
_FOREIGN = "_smp_foreign_parameters"


def require_torch() -> None:
    """Raises SMPUnsupportedError if this torch has no FSDP2."""
    if fully_shard is None:
        raise SMPUnsupportedError(
            "'sharded_data_parallel_degree' above 1 needs FSDP2, which torch has from 2.6 on, and this is "
            f"{torch.__version__}. Fix: use the image pytorch-latest or pytorch-cpu, or 'shard_optimizer_state'."
        )


def register_parameter(module: nn.Module, param: nn.Parameter) -> None:
    """Says that a module uses a parameter of another module, outside of that module's calls (AWS API 1.11).

    With `sharded_data_parallel_degree`, the parameter is then gathered whenever both may need it. Call it before
    `smp.DistributedModel`. Otherwise it has no effect.

    Args:
        module: The module that uses the parameter.
        param: The parameter.
    """
    module.__dict__.setdefault(_FOREIGN, []).append(param)


# --- tensors in parts


def make_whole(value: Any, like: Any = None) -> Any:
    """Gathers the parts of a tensor: of a DTensor over its mesh, of a share over TP_GROUP. All their ranks call it.

    `like` is the parameter that says how tensor parallelism splits it; None: `value` itself. A value of another shape
    than `like`, such as a count of steps, is the same on all ranks. Other values are returned as they are.
    """
    like = value if like is None else like
    split = split_of(like)
    value = value.full_tensor() if _is_split(value) else value
    if split is None or not _has_shape(value, like.shape):
        return value
    own, group = value.detach().contiguous(), tensor_group()
    shares = [torch.empty_like(own) for _ in range(group.size)]
    dist.all_gather(shares, own, group=group.group)
    return torch.cat(shares, split.axis)


def region_of(value: torch.Tensor) -> Region:
    """Returns the place of this rank's part in the whole: of a DTensor, a tensor-parallel parameter, or both."""
    own, whole, first = tuple(value.shape), list(value.shape), [0] * value.dim()
    if _is_split(value):
        part: Any = value
        mesh, own = part.device_mesh, tuple(part.to_local().shape)
        rows = -(-whole[0] // mesh.size(mesh.ndim - 1))  # as torch.chunk has it
        first[0] = min(mesh.get_local_rank(mesh.ndim - 1) * rows, whole[0])
    split = split_of(value)
    if split is not None:
        first[split.axis] += tensor_group().rank * whole[split.axis]
        whole[split.axis] = split.size
    return Region(tuple(first), own, tuple(whole))


def wrap_like(local: torch.Tensor, target: Any) -> Any:
    """Makes a DTensor of this rank's part if `target` is one; otherwise returns the part itself."""
    if not _is_split(target):
        return local
    return DTensor.from_local(
        local, target.device_mesh, target.placements, run_check=False, shape=target.shape, stride=target.stride()
    )


def replicate_like(value: torch.Tensor, target: Any) -> torch.Tensor:
    """Makes a DTensor of a value that all ranks have if `target` is one; otherwise returns the value itself."""
    if not _is_split(target):
        return value
    return DTensor.from_local(value, target.device_mesh, [Replicate()] * target.device_mesh.ndim, run_check=False)


def place_like(value: Any, target: Any) -> Any:
    """Splits a whole tensor as `target` is, or wraps a part that `pack_parts` made. Else returns `value` itself.

    `target` is a DTensor, a parameter that tensor parallelism splits, or both.

    Raises StepUsageError if a part has another size than this rank's part of `target`.
    """
    split = split_of(target)
    if split is not None and isinstance(value, torch.Tensor) and not _is_split(value):
        value = take_share(value, split)
    is_part = isinstance(value, Mapping) and set(value) == {_PART}
    if not _is_split(target) or _is_split(value) or not (is_part or _has_shape(value, target.shape)):
        return value
    own = target.to_local()
    part = value[_PART] if is_part else _own_chunk(value, target.device_mesh, own)
    if part.shape != own.shape:
        raise StepUsageError(
            f"A state dict has a part of shape {tuple(part.shape)}, and this rank's is {tuple(own.shape)}. Fix: load "
            "the whole state dict, or the part of the same rank and the same 'sharded_data_parallel_degree'."
        )
    return wrap_like(part.to(own.device), target)


def pack_parts(value: Any) -> Any:
    """Replaces split tensors in nested containers by marked parts, which `place_like` understands."""
    return tree_map(_pack, value)


def _pack(value: Any) -> Any:
    if not _is_split(value):
        return value
    return {_PART: value.to_local()} if has_parts(value) else value.full_tensor()


def has_parts(value: Any) -> bool:
    """Whether ranks have different parts of a DTensor. The norms in the state of some optimizers are sums instead."""
    return _is_split(value) and value.placements[-1].is_shard()


def _is_split(value: Any) -> bool:
    return DTensor is not None and isinstance(value, DTensor)


def _has_shape(value: Any, shape: torch.Size) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == shape


def _own_chunk(whole: torch.Tensor, mesh: Any, own: torch.Tensor) -> torch.Tensor:
    """Returns this rank's rows: FSDP2 splits as torch.chunk does, and ranks beyond the last chunk have none."""
    chunks, index = whole.chunk(mesh.size(mesh.ndim - 1), 0), mesh.get_local_rank(mesh.ndim - 1)
    return chunks[index].clone() if index < len(chunks) else whole.new_empty(own.shape)


# --- the model


class Shards:
    """The shards of the script's model. All ranks make it, when the model is placed.

    `ranks`: the ranks that hold one replica together, with all shares of tensor parallelism. `group`: torch's group of
    those with the parts of this rank's shares. `parameters`: the split parameters by those that they replace.
    """

    def __init__(self, state: TorchState, manager: ModuleManager) -> None:
        require_torch()
        degree = state.cfg.sharded_data_parallel_degree
        own, self._mesh = _open_mesh(state, degree)
        self.ranks = tuple(sorted(other for rank in own for other in state.grid.group("TP_GROUP", rank)))
        self.group = state.process_group_of(own)
        self.parameters: dict[nn.Parameter, nn.Parameter] = {}
        most = min(state.cfg.sdp_reduce_bucket_size, state.cfg.sdp_max_live_parameters // 2)
        self._units = [*find_units(manager.root, most), manager.root]
        self._manager = manager

    def split(self, prepare: Callable[[Collection[nn.Module]], Mapping[nn.Parameter, nn.Parameter]]) -> None:
        """Splits the model unit by unit, so that no rank holds a second whole one.

        Args:
            prepare: Called before a unit is split, with its modules: makes their tensors, with the same values on all
                ranks. Returns new parameters by those that they replace.
        """
        done: set[nn.Module] = set()
        for unit in self._units:
            modules = [module for module in unit.modules() if module not in done]
            done.update(modules)
            made = prepare(modules)
            before = [(module, key, p) for module in modules for key, p in module._parameters.items() if p is not None]
            if before or not isinstance(unit, nn.Sequential):
                for _, _, parameter in before:
                    parameter.data = parameter.data.contiguous()  # FSDP2 refuses others
                unit.register_forward_hook(_copy_views)
                fully_shard(unit, mesh=self._mesh, reshard_after_forward=True)
            originals = {after: original for original, after in made.items()}
            for module, key, whole in before:
                part: Any = module._parameters[key]
                copy_split(whole, part)
                _name_part(part)
                self.parameters[originals.get(whole, whole)] = part

    def release(self) -> None:
        """Frees what calls without a backward have left gathered. Parameters of modules are parts again."""
        for unit in self._units:
            reshard: Callable[[], None] | None = getattr(unit, "reshard", None)
            if reshard:
                reshard()


def _copy_views(module: nn.Module, args: Any, output: Any) -> Any:
    """Copies outputs that are views, as nn.Linear returns: FSDP2 loses its hook if one is changed in place."""
    return tree_map(
        lambda item: (
            item.clone() if isinstance(item, torch.Tensor) and item.requires_grad and item._is_view() else item
        ),
        output,
    )


def find_units(root: nn.Module, most: int) -> Iterator[nn.Module]:
    """Yields the modules that are gathered at once, each before its parents; the root has the rest.

    A unit has at most `most` parameters, unless it has no children. It contains no list of blocks, and shares no
    parameter with a module outside. An nn.Sequential is not one, because its children are called one by one.
    """
    users: dict[int, int] = {}
    for module in root.modules():
        for parameter in _used(module):
            users[id(parameter)] = users.get(id(parameter), 0) + 1
    yield from _units_below(root, most, users)


def _units_below(module: nn.Module, most: int, users: Mapping[int, int]) -> Iterator[nn.Module]:
    for child in module.children():
        if _is_unit(child, most, users):
            yield child
        else:
            yield from _units_below(child, most, users)


def _is_unit(module: nn.Module, most: int, users: Mapping[int, int]) -> bool:
    used = [id(p) for part in module.modules() for p in _used(part)]
    if not used or any(used.count(one) < users[one] for one in set(used)):
        return False
    if not list(module.children()):
        return True
    is_called = type(module).forward not in (nn.Sequential.forward, nn.Module.forward)
    size = sum(p.numel() for p in module.parameters())
    return is_called and size <= most and not any(map(_is_list_of_blocks, module.modules()))


def _is_list_of_blocks(module: nn.Module) -> bool:
    """Whether a list or sequence has several children of a class, with children of their own."""
    if not isinstance(module, (nn.ModuleList, nn.Sequential)):
        return False
    kinds = [type(child) for child in module if list(child.children())]
    return len(kinds) > len(set(kinds))


def _used(module: nn.Module) -> list[nn.Parameter]:
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    foreign: list[nn.Parameter] = module.__dict__.get(_FOREIGN, [])
    return own + foreign


def _name_part(parameter: Any) -> None:
    """Adds the attributes that published scripts read: the shape and size of the whole, and this rank's part."""
    part = parameter.to_local().detach().view(-1)
    part.ds_numel = part.numel()
    parameter.ds_shape, parameter.ds_numel, parameter.ds_tensor = parameter.shape, parameter.numel(), part


def _open_mesh(state: TorchState, degree: int) -> tuple[tuple[int, ...], Any]:
    """Makes the groups of consecutive ranks with one replica, and of ranks with the same part; all ranks call it.

    Returns this rank's replica, of its shares alone with tensor parallelism, and torch's mesh.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mine: Any = None
    for ranks in state.grid.groups("RDP_GROUP"):
        rows = [ranks[at : at + degree] for at in range(0, len(ranks), degree)]
        columns = list(zip(*rows)) if len(rows) > 1 else []
        for group in (*rows, *columns):
            state.open_group(group)
        if state.rank in ranks:
            own = next(row for row in rows if state.rank in row)
            column = columns[own.index(state.rank)] if columns else None
            mine = own, column, rows
    own, column, rows = mine
    if column is None:
        return own, DeviceMesh.from_group(state.process_group_of(own), device)
    groups = [state.process_group_of(column), state.process_group_of(own)]
    return own, DeviceMesh.from_group(groups, device, mesh=torch.tensor(rows), mesh_dim_names=("replicas", "shards"))
