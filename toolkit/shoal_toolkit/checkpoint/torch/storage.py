"""Writes and reads the state of a training with torch.distributed.checkpoint, as one process.

Tensors have the names that torch.distributed.checkpoint gives them: `model.conv1.weight`. Everything else of the state
is in the entry `structure`, which is pickled. So load only checkpoints that you trust, as with torch.load.
"""

from __future__ import annotations

import pickle
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from shoal_toolkit.checkpoint.directories import CheckpointError

STRUCTURE = "structure"
FORMAT = 1
_SAVE, _LOAD = ("save", "save_state_dict"), ("load", "load_state_dict")


class _Name(NamedTuple):
    """Stands for a tensor in the structure."""

    name: str


def flatten(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of nested dicts, lists and tuples by their names, and the rest as `structure`.

    Raises:
        CheckpointError: If a tensor is sharded over ranks.
    """
    tensors: dict[str, torch.Tensor] = {}
    structure = _take_tensors(dict(state), "", tensors)
    tensors[STRUCTURE] = _to_tensor({"format": FORMAT, "state": structure})
    return tensors


def _take_tensors(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        if hasattr(value, "device_mesh") or type(value).__name__ == "ShardedTensor":
            raise CheckpointError(
                f"{name} is sharded over ranks (FSDP). This helper saves models that each rank holds completely (DDP). "
                "Fix: save it with torch.distributed.checkpoint.save"
            )
        if name in tensors:
            raise CheckpointError(f"two tensors of the state have the name {name}. Fix: rename one")
        tensors[name] = value.detach()
        return _Name(name)
    if type(value) in (dict, OrderedDict):
        return {key: _take_tensors(each, f"{name}.{key}" if name else str(key), tensors) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_take_tensors(each, f"{name}.{index}", tensors) for index, each in enumerate(value))
    return value


def unflatten(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the state of which `flatten` made these tensors."""
    saved = pickle.loads(tensors[STRUCTURE].numpy().tobytes())
    if saved["format"] != FORMAT:
        raise CheckpointError(f"written by a version with format {saved['format']}; this version reads {FORMAT}")
    state: dict[str, Any] = _put_tensors(saved["state"], tensors)
    return state


def _put_tensors(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, _Name):
        return tensors[value.name]
    if type(value) is dict:
        return {key: _put_tensors(each, tensors) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_put_tensors(each, tensors) for each in value)
    return value


def _to_tensor(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def write(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write tensors into a new directory, and wait until they are on the disk.

    Raises:
        OSError: If they cannot be written.
    """
    _call(*_SAVE, tensors, storage_writer=FileSystemWriter(path))


def read(path: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint, on the CPU.

    Raises:
        CheckpointError: If a file is missing, truncated or unreadable. The message has no fix yet.
    """
    reader = FileSystemReader(path)
    metadata_path = path / ".metadata"
    try:
        metadata = reader.read_metadata()
        found: dict[str, Any] = metadata.state_dict_metadata
        tensors = {name: torch.empty(each.size, dtype=each.properties.dtype) for name, each in found.items()}
        placed = [(path / each.relative_path, each.offset + each.length) for each in metadata.storage_data.values()]
        tensors[STRUCTURE]
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        raise CheckpointError(f"{metadata_path} is missing: the checkpoint is incomplete.") from error
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(f"{metadata_path} cannot be read: {_describe(error)}.") from error
    _check_sizes(placed)
    try:
        _call(*_LOAD, tensors, storage_reader=reader)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {_describe(error)}.") from error
    return tensors


def _call(name: str, older_name: str, tensors: dict[str, torch.Tensor], **given: Any) -> None:
    """Call a function of torch.distributed.checkpoint for this process alone. Before torch 2.2 it has the older name.

    Raises:
        Exception: The first one that torch wraps into its CheckpointException.
    """
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    try:
        getattr(dcp, name if hasattr(dcp, name) else older_name)(tensors, no_dist=True, **given)
    except CheckpointException as error:
        (first, _), *_ = error.failures.values()
        raise first from error


def _check_sizes(placed: list[tuple[Path, int]]) -> None:
    """Compare the size of each file with the last byte that the metadata places in it."""
    for file, end in sorted(placed, reverse=True):
        if not file.exists():
            raise CheckpointError(f"{file} is missing: the checkpoint is incomplete.")
        if file.stat().st_size < end:
            raise CheckpointError(f"{file} is truncated: it has {file.stat().st_size} bytes, and {end} were written.")


def _describe(error: BaseException) -> str:
    return " ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
