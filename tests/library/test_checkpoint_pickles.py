"""Checkpoints of the helper are loaded as data: nothing in their pickles runs unless the script trusts them."""

from __future__ import annotations

import collections
import datetime
import io
import os
import pickle
import types
import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from shoal_checkpoint import torch as helper
from shoal_checkpoint.torch import Checkpoint, CheckpointError, pickles, storage


class Attack:
    """Makes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.file),)


def save(directory: Path, **state: Any) -> Path:
    checkpoint = Checkpoint(directory, model=torch.nn.Linear(2, 2), asynchronous=False, **state)
    for _ in checkpoint.epochs(1):
        pass
    return directory / "step-00000000"


@pytest.mark.parametrize("wrap", [list, tuple, lambda each: {"a": each}, lambda each: collections.deque(each)])
def test_an_object_in_the_state_runs_nothing(tmp_path: Path, wrap: Any) -> None:
    with pytest.warns(
        UserWarning, match=r"will not be loaded: it has an object of \w+\.mkdir.*SHOAL_TRUST_CHECKPOINTS"
    ):
        save(tmp_path / "c", own={"x": wrap([Attack(tmp_path / "ran")])})
    with pytest.raises(CheckpointError, match=r"step-00000000: it has an object of \w+\.mkdir.*Fix: save only"):
        Checkpoint(tmp_path / "c", model=torch.nn.Linear(2, 2), own={})
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("how", ["argument", "variable"])
def test_a_script_can_trust_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(tmp_path / "c", own={"x": types.SimpleNamespace(a=1)})
    if how == "variable":
        monkeypatch.setenv("SHOAL_TRUST_CHECKPOINTS", "1")
    own: dict[str, Any] = {}
    Checkpoint(
        tmp_path / "c",
        model=torch.nn.Linear(2, 2),
        own=own,
        weights_only=False if how == "argument" else None,
    )
    assert own["x"].a == 1


def test_a_wrong_trust_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "c")
    monkeypatch.setenv("SHOAL_TRUST_CHECKPOINTS", "yes")
    with pytest.raises(CheckpointError, match=r"SHOAL_TRUST_CHECKPOINTS is 'yes'\. Fix: set it to 1"):
        Checkpoint(tmp_path / "c", model=torch.nn.Linear(2, 2))


@pytest.mark.parametrize("trust", ["", "1"])
def test_the_metadata_of_torch_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trust: str) -> None:
    monkeypatch.setenv("SHOAL_TRUST_CHECKPOINTS", trust)
    path = save(tmp_path / "c")
    (path / ".metadata").write_bytes(pickle.dumps(Attack(tmp_path / "ran")))
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read: it has an object of \w+\.mkdir"):
        Checkpoint(tmp_path / "c", model=torch.nn.Linear(2, 2))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_a_tensor_of_torch_runs_nothing(tmp_path: Path, zipped: bool) -> None:
    """torch 2.0 loads any object there."""
    path = save(tmp_path / "c")
    (file,) = path.glob("*.distcp")
    out = io.BytesIO()
    torch.save(Attack(tmp_path / "ran"), out, _use_new_zipfile_serialization=zipped)
    file.write_bytes(out.getvalue() + bytes(file.stat().st_size))
    with pytest.raises(CheckpointError, match="cannot be read"):
        Checkpoint(tmp_path / "c", model=torch.nn.Linear(2, 2))
    assert not (tmp_path / "ran").exists()


def test_the_metadata_names_no_file_elsewhere(tmp_path: Path) -> None:
    path = save(tmp_path / "c")
    with (path / ".metadata").open("rb") as file:
        metadata = pickles.load(file)
    for info in metadata.storage_data.values():
        info.relative_path = f"../../other/{info.relative_path}"
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="is not in the checkpoint"):
        Checkpoint(tmp_path / "c", model=torch.nn.Linear(2, 2))


ARRAY = numpy.ones(1)
_reconstruct = ARRAY.__reduce__()[0]
_frombuffer = ARRAY.__reduce_ex__(5)[0]


class Call:
    """Calls a function of data when it is unpickled, and sets the state of its result."""

    def __init__(self, function: Any, *values: Any, state: Any = None) -> None:
        self.parts = (function, values) if state is None else (function, values, state)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.parts


def set_dtype(name: str, *state: Any, flags: int = 0) -> Any:
    return Call(numpy.dtype, name, False, True, state=(3, "|", None, *state, flags))


def read_array(dtype: Any) -> bytes:
    """Return the pickle of the list of an array that is made of eight bytes. numpy follows them if they are objects."""
    return pickle.dumps(Call(list, Call(_frombuffer, b"AAAAAAAA", dtype, (1,), "C")))


POINTERS = {
    "bytes as objects": read_array(set_dtype("O8", None, None, -1, -1)),
    "bytes as fields of objects": read_array(set_dtype("V8", ("a",), {"a": (numpy.dtype("O"), 0)}, 8, 1)),
    "a field beyond the memory": read_array(set_dtype("V8", ("a",), {"a": (numpy.dtype("S64"), 1 << 20)}, 8, 1)),
    "a larger text than its bytes": read_array(set_dtype("S8", None, None, 1 << 24, 1)),
    "an array of pointers": pickle.dumps(Call(list, Call(numpy.ndarray, (1,), numpy.dtype("O"), bytearray(8 * b"A")))),
    "the same by its class": b"cnumpy\nndarray\n((K\x01tcnumpy\ndtype\n(S'O'\ntRS'AAAAAAAA'\nt\x81.",
    "another class of arrays": pickle.dumps(Call(_reconstruct, str, (0,), b"b")),
}
ATTACKS = {
    **POINTERS,
    "a dotted name": b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93\x8c\x04true\x85R.",
    "an old opcode": b"cos\nsystem\n(S'true'\ntR.",
    "a builtin": b"cbuiltins\neval\n(S'1'\ntR.",
    "getattr": b"cbuiltins\ngetattr\n(ctorch\nSize\nS'mro'\ntR.",
    "a module of torch": b"ctorch.hub\nload\n(S'x'\ntR.",
    "torch's loader": b"ctorch\nload\n(S'x'\ntR.",
    "an instance": b"(ios\nsystem\n.",
    "an extension": b"\x82\x01.",
    "a storage with code": pickle.dumps(torch.ones(1)).replace(b"_load_from_bytes", b"_load_from_bytez"),
}


@pytest.mark.parametrize("data", ATTACKS.values(), ids=ATTACKS)
def test_other_pickles_call_nothing(data: bytes) -> None:
    with pytest.raises((pickles.UntrustedError, pickle.UnpicklingError, ValueError, EOFError, TypeError)):
        pickles.load(io.BytesIO(data))


def test_a_storage_inside_is_loaded_as_data(tmp_path: Path) -> None:
    out = io.BytesIO()
    torch.save(Attack(tmp_path / "ran"), out)

    class Storage:
        def __reduce__(self) -> tuple[Any, ...]:
            return torch.storage._load_from_bytes, (out.getvalue(),)

    with pytest.raises(pickle.UnpicklingError):
        pickles.load(io.BytesIO(pickle.dumps(Storage())))
    assert not (tmp_path / "ran").exists()


def test_data_of_usual_scripts_is_loaded(tmp_path: Path) -> None:
    own: dict[str, Any] = {
        "best": numpy.float64(0.5),
        "array": numpy.arange(3),
        "texts": numpy.array(["a", None], dtype=object),
        "set": {1, 2},
        "counts": collections.Counter("aab"),
        "default": collections.defaultdict(list, {"a": [1]}),
        "recent": collections.deque([1], maxlen=3),
        "tensors": {1: frozenset([1])},
        "inside": collections.deque([torch.ones(2, dtype=torch.bfloat16)]),
        "dtype": torch.float16,
        "device": torch.device("cpu"),
        "size": torch.Size([1]),
        "began": datetime.datetime(2026, 1, 31, tzinfo=datetime.timezone.utc),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(tmp_path / "c", own=dict(own))
    loaded: dict[str, Any] = {}
    helper.Checkpoint(tmp_path / "c", model=torch.nn.Linear(2, 2), own=loaded)
    assert repr(loaded) == repr(own)


def test_the_formats_of_torch_are_read_as_torch_wrote_them(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(2, 3), "b": torch.zeros(0), "c": torch.tensor(5), "d": torch.ones(4)[::2]}
    storage.write({**tensors, storage.STRUCTURE: torch.zeros(1, dtype=torch.uint8)}, tmp_path / "c")
    read = storage.read(tmp_path / "c")
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
