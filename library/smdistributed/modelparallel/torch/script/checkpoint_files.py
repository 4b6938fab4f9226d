"""Files of checkpoints: written so that they are complete or absent, and loaded as data, not as code.

Data are tensors, numbers, strings, and containers of them. Other objects are pickles, which run code of the person who
wrote the file. They are refused unless the script or SMP_TRUST_CHECKPOINTS says that they are trusted.
"""

from __future__ import annotations

import inspect
import os
import pickle
import re
import shutil
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch

from smdistributed.modelparallel.backend.exceptions import SMPRuntimeError

TORCH_WEIGHTS, SAFE_WEIGHTS = "pytorch_model.bin", "model.safetensors"
"""The full checkpoint that transformers' Trainer asks for, and the one that it has saved."""
TAG_FIX = "Fix: name one that is there, or another directory."
_TRUST_VARIABLE = "SMP_TRUST_CHECKPOINTS"
_TRUSTS = {"": False, "0": False, "1": True}
_NEWEST = "newest"
_MOST_NAME = 255  # bytes of a file's name


def write_object(obj: Any, path: Path, **options: Any) -> None:
    """Writes an object by torch.save. The file appears when it is complete and on disk."""
    with new_file(path) as file:
        torch.save(obj, file, **options)


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Yields a file to write. It appears at `path` when it is complete and on disk."""
    unfinished = _unfinished(path)
    with unfinished.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def write_text(path: Path, text: str) -> None:
    """Writes a text file, and replaces one that exists. It appears when it is complete and on disk."""
    with new_file(path) as file:
        file.write(text.encode())


def _unfinished(path: Path) -> Path:
    """Returns the hidden path beside a file where this process writes it first. A link in its place is removed."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    remove(unfinished)
    return unfinished


def remove(path: Path) -> None:
    """Removes a file, a link or a directory, if there is one. Others may have put a link there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def write_user_content(content: Any, path: Path) -> None:
    """Writes an object of the script and reads it back: warns now if loading it later will require trust."""
    write_object(content, path)
    try:
        torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        warnings.warn(
            f"user_content holds more than tensors, numbers, strings and containers of them{_name_class(error)}: to "
            f"resume, give smp.resume_from_checkpoint weights_only=False, or set {_TRUST_VARIABLE}=1.",
            stacklevel=2,
        )


def read_object(path: Path, map_location: Any = "cpu", weights_only: bool | None = None, **options: Any) -> Any:
    """Loads what `write_object` wrote. For `weights_only`, see `checkpoints.load`.

    Raises SMPRuntimeError if there is no such file, it is damaged or holds more than `weights_only` allows, or
    SMP_TRUST_CHECKPOINTS is wrong. Raises pickle.UnpicklingError if it is damaged, and any object is allowed.
    """
    if not path.is_file():
        raise SMPRuntimeError(f"There is no {path}: {path.parent} holds {list_files(path.parent)}. {TAG_FIX}")
    return load_object(os.fspath(path), path, weights_only, map_location=map_location, **options)


def load_object(file: str | BinaryIO, path: Path, weights_only: bool | None, **options: Any) -> Any:
    """Loads an object from a file or from bytes. `path`: its name in errors. Raises the errors of `read_object`."""
    only = not _trusts_checkpoints() if weights_only is None else weights_only
    try:
        return torch.load(file, weights_only=only, **options)
    except pickle.UnpicklingError as error:
        if not only:
            raise
        raise SMPRuntimeError(
            f"{path} holds more than tensors, numbers, strings and containers of them{_name_class(error)}, or is"
            " damaged. Fix: give smp.load or smp.resume_from_checkpoint weights_only=False, or set the environment"
            f" variable {_TRUST_VARIABLE}=1. Loading any object runs code of the person who wrote the file, so trust"
            " them first."
        ) from error


def read_mapped(path: Path, weights_only: bool | None) -> Any:
    """Loads an object as `read_object` does. If torch can, its tensors are read from the file when they are used."""
    is_mapped = "mmap" in inspect.signature(torch.load).parameters and zipfile.is_zipfile(path)  # not before torch 2.1
    return read_object(path, weights_only=weights_only, **({"mmap": True} if is_mapped else {}))


def read_weights(path: Path, weights_only: bool | None) -> Any:
    """Loads a model's state dict: a file of safetensors by its name, else as `read_mapped`."""
    if path.name != SAFE_WEIGHTS:
        return read_mapped(path, weights_only)
    from safetensors.torch import load_file

    return load_file(path)


def write_newest(directory: Path, tag: str, kind: str) -> None:
    """Notes a tag as the newest checkpoint of its kind, "partial" or "full", and as the newest of both."""
    for name in (f"{_NEWEST}_{kind}", _NEWEST):
        write_text(directory / name, tag)


def read_newest(directory: Path, kind: str) -> str:
    """Returns the newest tag of a kind, "partial" or "full". It may be of the other kind: old directories note none.

    Raises SMPRuntimeError if there is no note at all, or it is not the name of a file.
    """
    for file in (directory / f"{_NEWEST}_{kind}", directory / _NEWEST):
        if file.is_file():
            with file.open("rb") as opened:
                tag = opened.read(_MOST_NAME + 1).decode(errors="replace")
            if len(tag) > _MOST_NAME or Path(tag).name != tag:
                raise SMPRuntimeError(
                    f"{file} does not hold the tag of a checkpoint in its directory. Fix: give the tag, or remove the "
                    "file and save again."
                )
            return tag
    raise SMPRuntimeError(f"There is no {kind} checkpoint in {directory}: it holds {list_files(directory)}. {TAG_FIX}")


def list_files(directory: Path) -> str:
    """Returns the names in a directory, for messages; "nothing" if it is empty or missing."""
    return ", ".join(sorted(path.name for path in directory.glob("*"))) or "nothing"


def _name_class(error: BaseException) -> str:
    """Returns the class that torch refused to load, in parentheses after a space; empty if its error names none."""
    found = re.search(r"GLOBAL ([\w.]+)|Unsupported class ([\w.]+)", str(error))
    return f" ({found[1] or found[2]})" if found else ""


def _trusts_checkpoints() -> bool:
    """Whether SMP_TRUST_CHECKPOINTS is 1. Raises SMPRuntimeError if it is neither 1, 0 nor unset."""
    text = os.environ.get(_TRUST_VARIABLE, "")
    if text not in _TRUSTS:
        raise SMPRuntimeError(
            f"{_TRUST_VARIABLE} is {text!r}. Fix: set it to 1 to load any objects from checkpoints, or unset it."
        )
    return _TRUSTS[text]
