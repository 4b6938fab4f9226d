"""Loads pickles of checkpoints as data: numbers, texts, containers, arrays, tensors, and torch's own metadata.

A pickle can name any function, and loading it calls that function. So others than these are refused, unless the script
or SHOAL_TRUST_CHECKPOINTS says that the checkpoint is trusted. smp.load has the same rule.
"""

from __future__ import annotations

import enum
import io
import os
import pickle
from typing import IO, Any, ClassVar

import torch

from shoal_checkpoint.directories import CheckpointError

TRUST_VARIABLE = "SHOAL_TRUST_CHECKPOINTS"
_TRUSTS = {"": False, "0": False, "1": True}
_NUMPY_ARRAYS = ("numpy.core.multiarray", "numpy._core.multiarray")
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
    "numpy": {"dtype"},
    **{module: {"scalar"} for module in _NUMPY_ARRAYS},
    **{f"numpy.{core}.numeric": {"_frombuffer"} for core in ("core", "_core")},
    "shoal_checkpoint.torch.storage": {"_Name"},
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

    def __init__(self, found: str) -> None:
        super().__init__(
            f"it has {found}, and loading it runs code of the person who wrote the checkpoint. "
            f"Fix: save only numbers, texts, tensors, arrays and containers of them; or, if you trust that person, "
            f"give Checkpoint weights_only=False, or set {TRUST_VARIABLE}=1"
        )


_ARRAY = object()
"""Stands for numpy's class of arrays in a pickle. The class itself would make an array of pointers out of bytes."""


class _DtypeError(Exception):
    """A pickle has a numpy dtype. Its state must be checked."""


class _Data:
    """Lets an unpickler load data only, and raises UntrustedError at any other class or function, before its import."""

    has_checks = False
    """Whether the unpickler checks the states of numpy's dtypes."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _load_storage  # torch's own one loads any object
        if (module, name) == ("builtins", "getattr"):
            return _get_member  # Python 3.11 pickles members of enumerations in this way
        if (module, name) == ("numpy", "dtype") and not self.has_checks:
            raise _DtypeError
        if (module, name) == ("numpy", "ndarray"):
            return _ARRAY
        if name == "_reconstruct" and module in _NUMPY_ARRAYS:
            return _make_array
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)  # type: ignore[misc]
        if module == "torch" and "." not in name and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise UntrustedError(f"an object of {module}.{name}")


class _DataUnpickler(_Data, pickle.Unpickler):
    """The fast one. Raises _DtypeError at a numpy dtype."""


class _CheckedUnpickler(_Data, pickle._Unpickler):
    """The one of Python, which takes seconds for millions of values, and has a place for a check."""

    has_checks = True
    stack: list[Any]
    dispatch: ClassVar[dict[int, Any]] = {**pickle._Unpickler.dispatch}

    def load_build(self) -> None:
        """Sets the state of the last object. numpy does not check a dtype's, and makes objects out of bytes by it."""
        import numpy  # torch does not need it

        if isinstance(self.stack[-2], numpy.dtype):
            _check_dtype(self.stack[-2], self.stack[-1])
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build


def _load_storage(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


def _make_array(kind: object, _shape: object, _type: object) -> Any:
    """Returns an array that gets its shape and data from the state that follows in the pickle."""
    if kind is not _ARRAY:
        raise UntrustedError("an array of another class than numpy's own")
    import numpy  # torch does not need it

    return numpy.ndarray((0,), "b")


def _check_dtype(found: Any, state: Any) -> None:
    """Raises UntrustedError unless numpy writes this state for such a dtype, in some order of bytes.

    Dtypes with fields are refused: an array could get other fields after its data, and objects among them.
    """
    known = [found.newbyteorder(order).__reduce__()[2][:8] for order in "<>="]
    has_unit = found.kind in "mM"  # the unit of times follows, and numpy checks it
    if found.names or state[:8] not in known or len(state) > 8 + has_unit:
        raise UntrustedError("a numpy dtype with fields, or one that numpy did not write")


def _get_member(enumeration: Any, name: str) -> Any:
    """Returns a member of an enumeration. Raises UntrustedError for an attribute of anything else."""
    if not isinstance(enumeration, enum.EnumMeta):
        raise UntrustedError(f"an attribute of {enumeration!r}")
    return enumeration[name]


def load(file: IO[bytes], weights_only: bool | None = None) -> Any:
    """Returns the object of a pickle.

    Args:
        file: The pickle.
        weights_only: True: data only. False: any object. None: data only, unless SHOAL_TRUST_CHECKPOINTS is 1.

    Raises:
        UntrustedError: If it has an object that is not data.
        CheckpointError: If SHOAL_TRUST_CHECKPOINTS is wrong.
        Exception: Any other one, if the pickle is damaged.
    """
    only = not _is_trusted() if weights_only is None else weights_only
    if not only:
        return pickle.load(file)
    began = file.tell()
    try:
        return _DataUnpickler(file).load()
    except _DtypeError:
        file.seek(began)
        return _CheckedUnpickler(file).load()


def _is_trusted() -> bool:
    text = os.environ.get(TRUST_VARIABLE, "")
    if text not in _TRUSTS:
        raise CheckpointError(f"{TRUST_VARIABLE} is {text!r}. Fix: set it to 1 to load any object, or unset it.")
    return _TRUSTS[text]
