"""Partial checkpoints of AWS's library: their weights are read, as far as AWS has published the layout.

AWS's documentation names the files `model_*.pt`, `optimizer_*.pt`, `fp16_states_*.pt` and `user_content.pt`. A file
`model_*.pt` is the `local_state_dict` of a rank. With sharded data parallelism, the weights are in `optimizer_*.pt`.
AWS's example `sharded_data_parallel_checkpoint.py` says how: each file has `fp32_flat_groups`, with ceil(n / count)
elements of each parameter, in the order of `param_shapes` in `user_content.pt`.

The state of optimizers, the content of `fp16_states_*.pt` and the shares of tensor parallelism are not published.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from smdistributed.modelparallel.backend.exceptions import SMPRuntimeError
from smdistributed.modelparallel.torch.script.checkpoint_files import read_mapped, read_object
from smdistributed.modelparallel.torch.script.model import DistributedModel
from smdistributed.modelparallel.torch.script.model_parts import check_keys, select_local
from smdistributed.modelparallel.torch.script.sharding import region_of

_PREFIX = "module."
_FULL = "Fix: save it with partial=False by AWS's library, and resume with partial=False."


def is_from_aws(directory: Path) -> bool:
    return any(directory.glob("model_*.pt"))


def refuse_optimizer(directory: Path) -> None:
    """Raises SMPRuntimeError if there is a state of an optimizer, which cannot be read."""
    if any(directory.glob("optimizer_*.pt")):
        raise SMPRuntimeError(
            f"{directory} is a partial checkpoint of AWS's library, which has not published the layout of the "
            "optimizer's state. Fix: give load_optimizer=False to resume with the weights alone."
        )


def read_from_aws(model: DistributedModel, directory: Path, strict: bool, weights_only: bool | None) -> None:
    """Loads this rank's weights into a placed model.

    Raises SMPRuntimeError for shares of tensor parallelism, for missing files, and as `read_object`. Raises
    RuntimeError as `DistributedModel.load_state_dict`.
    """
    tensors = select_local(model.manager, keep_vars=True).items()
    shapes = {key: region_of(value).whole for key, value in tensors if isinstance(value, torch.Tensor)}
    known = set(model.manager.root.state_dict())
    found: dict[str, torch.Tensor] = {}
    names: set[str] = set()
    for given, value in _read_tensors(directory, weights_only):
        name = given if given in known else given.removeprefix(_PREFIX)
        names.add(name)
        if name not in shapes:
            continue
        before = found.setdefault(name, value)
        if value.shape != shapes[name] or not _are_same(before, value):
            raise SMPRuntimeError(
                f"{directory} has {name} with shape {tuple(value.shape)}, and the model's is {shapes[name]}, or files "
                "differ in it. It may be a share of tensor parallelism: AWS has not published how they are split. "
                + _FULL
            )
    check_keys(model.manager, names, strict)
    model.load_state_dict(found, strict=False)


def _are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two files have the same tensor. NaN equals itself."""
    return one is other or bool(torch.all((one == other) | (one.isnan() & other.isnan())))


def _read_tensors(directory: Path, weights_only: bool | None) -> Iterator[tuple[str, torch.Tensor]]:
    models = [read_mapped(path, weights_only) for path in _sorted(directory, "model")]
    if all(isinstance(value, torch.Tensor) for part in models for value in part.values()):
        for part in models:
            yield from part.items()
        return
    shards = [read_mapped(path, weights_only) for path in _sorted(directory, "optimizer")]
    if not shards or not all("fp32_flat_groups" in shard for shard in shards) or "module" not in models[0]:
        raise SMPRuntimeError(
            f"{directory} has files of another layout than AWS has published: neither state dicts of tensors, nor "
            "fp32_flat_groups of sharded data parallelism. " + _FULL
        )
    content = read_object(directory / "user_content.pt", weights_only=weights_only)
    missing = [key for key in ("param_shapes", "buffer_names") if key not in content]
    if missing:
        raise SMPRuntimeError(
            f"{directory}/user_content.pt lacks {' and '.join(missing)}, without which AWS's shards have no names. "
            + _FULL
        )
    yield from ((name, models[0]["module"][name]) for name in content["buffer_names"])
    shapes = {name: shape for group in content["param_shapes"] for name, shape in group.items()}
    yield from _join_shards(directory, shards, shapes)


def _join_shards(
    directory: Path, shards: Sequence[Any], shapes: dict[str, torch.Size]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields whole parameters. Raises SMPRuntimeError if files or elements are missing."""
    count = shards[0]["partition_count"]
    count = max(count) if isinstance(count, list) else count
    flats = [torch.cat(list(shard["fp32_flat_groups"])) for shard in shards]
    size = sum(-(-shape.numel() // len(shards)) for shape in shapes.values())
    if count != len(shards) or any(flat.numel() != size for flat in flats):
        raise SMPRuntimeError(
            f"{directory} has {len(shards)} of {count} files optimizer_*.pt, or other elements than its param_shapes "
            "say. Fix: copy the files of all hosts there."
        )
    at = 0
    for name, shape in shapes.items():
        own = -(-shape.numel() // count)
        yield name, torch.cat([flat[at : at + own] for flat in flats])[: shape.numel()].view(shape)
        at += own


def _sorted(directory: Path, kind: str) -> list[Path]:
    return sorted(directory.glob(f"{kind}_*.pt"), key=lambda path: (len(path.name), path.name))
