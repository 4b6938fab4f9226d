"""Loads pickles of checkpoints as data: numbers, texts, containers, arrays, tensors, and torch's own metadata.

A pickle can name any function, and loading it calls that function. So others than these are refused, unless the script
or SHOAL_TRUST_CHECKPOINTS says that the checkpoint is trusted. smp.load has the same rule.
"""

from __future__ import annotations

import enum
import io
import os
import pickle
from typing import IO, Any

import torch

from shoal_toolkit.checkpoint.directories import CheckpointError

TRUST_VARIABLE = "SHOAL_TRUST_CHECKPOINTS"
_TRUSTS = {"": False, "0": False, "1": True}
_METADATA = "torch.distributed.checkpoint.metadata"
_DATA = {
    "builtins": {
        *(
            "bool",
            "bytearray",
            "bytes",
            "complex",
            "dict",
            "float",
            "frozenset",
            "int",
            "list",
            "range",
            "set",
            "slice",
        ),
        *("str", "tuple"),  # a defaultdict names its factory
    },
    "collections": {"Counter", "OrderedDict", "defaultdict", "deque"},
    "datetime": {"date", "datetime", "timedelta", "timezone"},
    "torch": {"Size", "device"},
    "torch.serialization": {"_get_layout"},
    "torch._utils": {"_rebuild_tensor_v2", "_rebuild_parameter"},
    "numpy": {"dtype", "ndarray"},
    **{f"numpy.{core}.multiarray": {"_reconstruct", "scalar"} for core in ("core", "_core")},
    **{f"numpy.{core}.numeric": {"_frombuffer"} for core in ("core", "_core")},
    "shoal_toolkit.checkpoint.torch.storage": {"_Name"},
}
_DCP = {
    _METADATA: {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed._shard.sharded_tensor.metadata": {"MEM_FORMAT_ENCODING", "TensorProperties"},  # torch 2.0
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},  # Python 3.13
}
_ALLOWED = {**_DATA, **_DCP}


class UntrustedError(CheckpointError):
    """A checkpoint has an object that runs code when it is loaded."""


class _DataUnpickler(pickle.Unpickler):
    """Loads data only. Raises UntrustedError at any other class or function, before it is imported or called."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class or function of data."""
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _load_storage  # torch's own one loads any object
        if (module, name) == ("builtins", "getattr"):
            return _get_member  # Python 3.11 pickles members of enumerations in this way
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and "." not in name and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise UntrustedError(
            f"it has an object of {module}.{name}, and loading it runs code of the person who wrote the checkpoint. "
            f"Fix: save only numbers, texts, tensors, arrays and containers of them; or, if you trust that person, "
            f"give Checkpoint weights_only=False, or set {TRUST_VARIABLE}=1"
        )


def _load_storage(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


def _get_member(enumeration: Any, name: str) -> Any:
    """Return a member of an enumeration. Raises UntrustedError for an attribute of anything else."""
    if not isinstance(enumeration, enum.EnumMeta):
        raise UntrustedError(f"it takes an attribute of {enumeration!r}")
    return enumeration[name]


def load(file: IO[bytes], weights_only: bool | None = None) -> Any:
    """Return the object of a pickle.

    Args:
        file: The pickle.
        weights_only: True: data only. False: any object. None: data only, unless SHOAL_TRUST_CHECKPOINTS is 1.

    Raises:
        UntrustedError: If it has an object that is not data.
        CheckpointError: If SHOAL_TRUST_CHECKPOINTS is wrong.
        Exception: Any other one, if the pickle is damaged.
    """
    only = not _is_trusted() if weights_only is None else weights_only
    return (_DataUnpickler if only else pickle.Unpickler)(file).load()


def _is_trusted() -> bool:
    text = os.environ.get(TRUST_VARIABLE, "")
    if text not in _TRUSTS:
        raise CheckpointError(f"{TRUST_VARIABLE} is {text!r}. Fix: set it to 1 to load any object, or unset it.")
    return _TRUSTS[text]
