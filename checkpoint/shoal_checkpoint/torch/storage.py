"""Writes and reads the state of a training with torch.distributed.checkpoint, as one process.

Tensors have the names that torch.distributed.checkpoint gives them: `model.conv1.weight`. Everything else of the state
is in the entry `structure`, which is pickled. It is loaded as data (`pickles`).
"""

from __future__ import annotations

import io
import os
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from shoal_checkpoint.directories import CheckpointError, open_regular
from shoal_checkpoint.torch import pickles

STRUCTURE = "structure"
FORMAT = 1


class _Name(NamedTuple):
    """Stands for a tensor in the structure."""

    name: str


def flatten(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Returns the tensors of nested dicts, lists and tuples by their names, and the rest as `structure`.

    Raises CheckpointError if a tensor is sharded over ranks.
    """
    tensors: dict[str, torch.Tensor] = {}
    structure = _take_tensors(dict(state), "", tensors)
    tensors[STRUCTURE] = _to_tensor({"format": FORMAT, "state": structure})
    return tensors


def find_objects(tensors: Mapping[str, torch.Tensor]) -> str:
    """Returns the error of loading the tensors of `flatten` without trust; empty if there is none."""
    try:
        unflatten(tensors, weights_only=True)
    except pickles.UntrustedError as error:
        return str(error)
    return ""


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


def unflatten(tensors: Mapping[str, torch.Tensor], weights_only: bool | None = None) -> dict[str, Any]:
    """Returns the state of which `flatten` made these tensors. Raises CheckpointError if it is not readable data."""
    try:
        saved = pickles.load(io.BytesIO(tensors[STRUCTURE].numpy().tobytes()), weights_only)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(f"its {STRUCTURE} cannot be read: {_describe(error)}.") from error
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
    """Writes tensors into a new directory, and waits until they are on the disk. Raises OSError if it cannot."""
    _save(tensors, path)


def read(path: Path) -> dict[str, torch.Tensor]:
    """Returns all tensors of a checkpoint, on the CPU. Nothing in its files is run: torch's own reader would.

    Raises CheckpointError, without a fix, if a file is missing, truncated or unreadable.
    """
    metadata_path = path / ".metadata"
    try:
        with os.fdopen(open_regular(metadata_path), "rb") as file:
            metadata = pickles.load(file, weights_only=True)
        found: dict[str, Any] = metadata.state_dict_metadata
        sizes = {name: each.size for name, each in found.items()}
        placed = {
            index.fqn: (_file_in(path, each.relative_path), int(each.offset), int(each.length))
            for index, each in metadata.storage_data.items()
        }
        places = {name: placed[name] for name in (*sizes, STRUCTURE)}
    except CheckpointError as error:
        raise CheckpointError(f"{metadata_path} cannot be read: {str(error).partition(', and')[0]}.") from error
    except FileNotFoundError as error:
        raise CheckpointError(f"{metadata_path} is missing: the checkpoint is incomplete.") from error
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(f"{metadata_path} cannot be read: {_describe(error)}.") from error
    _check_sizes([(file, offset + length) for file, offset, length in places.values()])
    try:
        tensors = {name: _read_tensor(*place) for name, place in places.items()}
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {_describe(error)}.") from error
    for name, tensor in tensors.items():
        if tensor.shape != sizes[name]:
            raise CheckpointError(f"{path} cannot be read: {name} is {tuple(tensor.shape)}, not {tuple(sizes[name])}.")
    return tensors


def _file_in(path: Path, name: str) -> Path:
    """Returns a file of a checkpoint. Raises ValueError if it is not in its directory."""
    if Path(name).name != name:
        raise ValueError(f"{name} is not in the checkpoint")
    return path / name


def _read_tensor(file: Path, offset: int, length: int) -> torch.Tensor:
    with os.fdopen(open_regular(file), "rb") as source:
        source.seek(offset)
        tensor = torch.load(io.BytesIO(source.read(length)), map_location="cpu", weights_only=True)
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{type(tensor).__name__} in {file.name} instead of a tensor")
    return tensor.detach()


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Calls torch.distributed.checkpoint for this process alone, and raises the first exception that it wraps."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    try:
        getattr(dcp, "save" if hasattr(dcp, "save") else "save_state_dict")(  # the latter before torch 2.2
            tensors, no_dist=True, storage_writer=FileSystemWriter(path)
        )
    except CheckpointException as error:
        (first, _), *_ = error.failures.values()
        raise first from error


def _check_sizes(placed: list[tuple[Path, int]]) -> None:
    """Compares the size of each file with the last byte that the metadata places in it."""
    for file, end in sorted(placed, reverse=True):
        if not file.is_file():
            raise CheckpointError(f"{file} is missing: the checkpoint is incomplete.")
        if file.stat().st_size < end:
            raise CheckpointError(f"{file} is truncated: it has {file.stat().st_size} bytes, and {end} were written.")


def _describe(error: BaseException) -> str:
    return " ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])


Tensors = dict[str, torch.Tensor]


class BackgroundWriter:
    """Calls a function with tensors that do not change: in the background with its own reused copies on the CPU."""

    def __init__(self, in_background: bool) -> None:
        self._thread = ThreadPoolExecutor(1, "shoal-checkpoint") if in_background else None
        self._running: Future[None] | None = None
        self._copies: Tensors = {}

    def write(self, tensors: Tensors, function: Callable[[Tensors], None]) -> None:
        """Waits for the call before, and raises its error. Copies the tensors, then calls the function."""
        self.wait()
        if self._thread is None:
            function(tensors)
            return
        self._copies = {name: self._copy(name, tensor) for name, tensor in tensors.items()}
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()
        self._running = self._thread.submit(function, self._copies)

    def _copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        copy = self._copies.get(name)
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return copy.copy_(tensor, non_blocking=True)

    def wait(self) -> None:
        """Waits until nothing is written. Raises the error of the call in the background."""
        running, self._running = self._running, None
        if running is not None:
            running.result()
