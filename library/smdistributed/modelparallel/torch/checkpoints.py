"""Checkpoints: partial ones, a file for each stage, and full ones, which plain PyTorch loads (AWS API).

A checkpoint is written beside its place and renamed when it is complete: killed at any moment, a job leaves the one
before. What is partial is kept by names of parameters, so that another number of stages can read it.

Files are loaded as data: tensors, numbers, words, and containers of them. Other objects are pickles, which run code of
whoever wrote the file, and are refused unless the script, or SMP_TRUST_CHECKPOINTS, says that they are trusted.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from smdistributed.core.options import only_known, warn_without_effect
from smdistributed.modelparallel.backend.api import barrier, dp_rank, mp_rank, pp_rank, pp_size, rdp_rank, tp_rank
from smdistributed.modelparallel.backend.exceptions import SMPRuntimeError
from smdistributed.modelparallel.torch.model import DistributedModel
from smdistributed.modelparallel.torch.optimizer import DistributedOptimizer
from smdistributed.modelparallel.torch.state_mod import state

_NEWEST, _SEEN = "newest", ".seen_by_"
_USER, _STAGES = "user_content.pt", "stages.json"
_TORCH_WEIGHTS, _SAFE_WEIGHTS = "pytorch_model.bin", "model.safetensors"
"""What transformers' Trainer asks for as a full checkpoint, and what it has saved instead."""
_TRUST = "SMP_TRUST_CHECKPOINTS"
_TRUSTS = {"": False, "0": False, "1": True}


@only_known
def save(
    obj: Any,
    f: str | os.PathLike[str],
    partial: bool = True,
    pickle_module: Any = pickle,
    pickle_protocol: int = 2,
    v3: bool = False,
) -> None:
    """Save an object, to `f`, or with `partial` to `f_{mp_rank}`, which every stage calls.

    pickle_module, pickle_protocol: as torch.save has them.
    v3: what replicas save differs, as it does with `shard_optimizer_state`: `f_{pp_rank}_{tp_rank}_{rdp_rank}`.
    """
    path = _of_this_replica(f) if partial and v3 else _of_this_stage(f) if partial else Path(f)
    _write(obj, path, pickle_module=pickle_module, pickle_protocol=pickle_protocol)


@only_known
def load(
    f: str | os.PathLike[str],
    map_location: Any = None,
    pickle_module: Any = pickle,
    pickle_load_args: Mapping[str, Any] | None = None,
    partial: bool = True,
    back_compat: bool = False,
    weights_only: bool | None = None,
) -> Any:
    """Load what `save` saved.

    pickle_module, pickle_load_args: as torch.load has them. Another module than pickle loads any object.
    weights_only: False: load any object, which runs code of whoever wrote the file. True: only tensors, numbers, words
        and containers of them. None: True, unless SMP_TRUST_CHECKPOINTS is 1. Ours.
    back_compat: has no effect, and warns: files of AWS's library before 1.10 cannot be read.
    """
    if back_compat:
        warn_without_effect("back_compat of smp.load", "optimizer files of AWS's library before 1.10 cannot be read")
    options = {"weights_only": weights_only, **(pickle_load_args or {})}
    if pickle_module is not pickle:
        options = {"weights_only": False, "pickle_module": pickle_module, **(pickle_load_args or {})}
    own = _of_this_replica(f)
    path = Path(f) if not partial else own if own.is_file() else _of_this_stage(f)
    return _read(path, map_location, **options)


def _of_this_stage(f: str | os.PathLike[str]) -> Path:
    return Path(f"{os.fspath(f)}_{mp_rank()}")


def _of_this_replica(f: str | os.PathLike[str]) -> Path:
    return Path(f"{os.fspath(f)}_{pp_rank()}_{tp_rank()}_{rdp_rank()}")


@only_known
def save_checkpoint(
    path: str | os.PathLike[str],
    tag: str,
    partial: bool = True,
    model: DistributedModel | None = None,
    optimizer: DistributedOptimizer | None = None,
    user_content: Any = None,
    translate_if_full: bool = True,
    num_kept_partial_checkpoints: int | None = None,
) -> None:
    """Save a checkpoint named `tag` under the directory `path`; every rank calls it (AWS API).

    partial: a directory `tag_partial` with a file for each stage; else `tag` is an ordinary state dict of the model,
        with `optimizer_{tag}` beside it.
    user_content: anything that can be pickled; `resume_from_checkpoint` returns it. It warns if that will have to be
        told to load more than tensors, numbers, words and containers of them.

    Hosts need no common file system: each has the files of its stages, as SageMaker's /opt/ml/checkpoints has, which
    it gathers.

    num_kept_partial_checkpoints: how many partial ones stay, the newest; None: all.

    translate_if_full: has no effect, and warns if it is false: full checkpoints have the model's own names in any case,
        and a Hugging Face model has Hugging Face's.
    """
    if not translate_if_full:
        warn_without_effect("translate_if_full of smp.save_checkpoint", "full checkpoints have the model's own names")
    if model is None and optimizer is None:
        raise SMPRuntimeError(f"save_checkpoint of {tag!r}: give a model, an optimizer or both.")
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    if partial:
        if _save_partial(directory, tag, model, optimizer, user_content):
            _drop_old(directory, num_kept_partial_checkpoints)
    else:
        _save_full(directory, tag, model, optimizer, user_content)
    barrier()


@only_known
def resume_from_checkpoint(
    path: str | os.PathLike[str],
    tag: str | None = None,
    partial: bool = True,
    strict: bool = True,
    load_optimizer: bool = True,
    load_sharded_optimizer_state: bool = True,
    translate_function: Callable[[Any], Any] | None = None,
    load_optimizer_states: bool | None = None,
    weights_only: bool | None = None,
) -> Any:
    """Load a checkpoint into the script's model and optimizer, and return its `user_content` (AWS API).

    Called on every rank, before or after the first step. A partial checkpoint keeps which stage has which module. On as
    many stages, the model is placed as it was, and a rank reads the files of its stage alone. On another number of
    stages, or when `smp.set_partition` places modules otherwise, every rank reads the files of all stages.

    Args:
        path: The directory of checkpoints.
        tag: Which; None: the newest of its kind.
        partial: Whether it is a partial one.
        strict: Whether missing and unexpected parameters are errors.
        load_optimizer: Whether the optimizer's state is loaded too.
        load_sharded_optimizer_state: Has no effect, and warns if it is false: it is for sharded data parallelism.
        translate_function: Of a full checkpoint: gives the model's state dict for what is in the file.
        load_optimizer_states: The name of `load_optimizer` before AWS API 1.11.
        weights_only: False: load any objects, which runs code of whoever wrote the checkpoint. True: only tensors,
            numbers, words and containers of them. None: True, unless SMP_TRUST_CHECKPOINTS is 1. Ours.

    Raises:
        SMPRuntimeError: If there is no such checkpoint, a partial one is to be translated, or a file holds more than
            `weights_only` allows.
    """
    if not load_sharded_optimizer_state:
        what = "load_sharded_optimizer_state of smp.resume_from_checkpoint"
        warn_without_effect(what, "it is for sharded data parallelism, which is not implemented")
    load_optimizer = load_optimizer if load_optimizer_states is None else load_optimizer_states
    directory = Path(path)
    tag = tag or _newest(directory, partial)
    if partial and translate_function is not None:
        raise SMPRuntimeError("translate_function is for full checkpoints. Fix: leave it out, or give partial=False.")
    if partial:
        return _resume_partial(directory / f"{tag}_partial", strict, load_optimizer, weights_only)
    weights = directory / tag
    if not weights.is_file() and tag == _TORCH_WEIGHTS:
        weights = directory / _SAFE_WEIGHTS
    if not weights.is_file():
        raise SMPRuntimeError(f"There is no full checkpoint {tag!r} in {directory}: it holds {_listing(directory)}.")
    found = _read_weights(weights, weights_only)
    state.the_model().load_state_dict(translate_function(found) if translate_function else found, strict)
    saved = directory / f"optimizer_{tag}"
    if load_optimizer and state.optimizer is not None and saved.is_file():
        state.optimizer.load_state_dict(_read(saved, weights_only=weights_only))
    return _read_user(directory, tag, weights_only)


def _save_partial(
    directory: Path, tag: str, model: DistributedModel | None, optimizer: DistributedOptimizer | None, user: Any
) -> bool:
    """Whether this rank is the one that looks after `directory`, of those that see it."""
    final, unfinished = directory / f"{tag}_partial", directory / f".{tag}_partial.unfinished"
    leads = _make_anew(unfinished)
    _write_own(unfinished, model, optimizer)
    if leads:
        _write_user(user, unfinished / _USER)
        if model:
            placed = {"partitions": state.cfg.partitions, "stages": model.manager.stages}
            _write_text(unfinished / _STAGES, json.dumps(placed))
    barrier()
    if leads:
        for mark in unfinished.glob(f"{_SEEN}*"):
            mark.unlink()
        old = directory / f".{tag}_partial.old"
        shutil.rmtree(old, ignore_errors=True)
        if final.exists():
            final.rename(old)
        unfinished.rename(final)
        _note_newest(directory, tag, partial=True)
        shutil.rmtree(old, ignore_errors=True)
    return leads


def _write_own(directory: Path, model: DistributedModel | None, optimizer: DistributedOptimizer | None) -> None:
    """Write what this rank's stage has, on the first replica."""
    shares = optimizer.local_state_dict() if optimizer else None  # gathered from all replicas
    if dp_rank() == 0 and model:
        _write(model.local_state_dict(), directory / f"model_{pp_rank()}.pt")
    if dp_rank() == 0 and shares is not None:
        _write({**shares, "names": _names()}, directory / f"optimizer_{pp_rank()}.pt")


def _make_anew(directory: Path) -> bool:
    """An empty directory on every host. Whether this rank is the first of those that see it: file systems are shared
    by all hosts, or by none.
    """
    if state.local_rank == 0:
        shutil.rmtree(directory, ignore_errors=True)
    barrier()
    if state.local_rank == 0:
        directory.mkdir(exist_ok=True)
        (directory / f"{_SEEN}{state.rank}").touch()
    barrier()
    return state.rank == min(int(mark.name.removeprefix(_SEEN)) for mark in directory.glob(f"{_SEEN}*"))


def _save_full(
    directory: Path, tag: str, model: DistributedModel | None, optimizer: DistributedOptimizer | None, user: Any
) -> None:
    shares = optimizer.local_state_dict() if optimizer else None
    if dp_rank() == 0:
        whole = model.state_dict(gather_to_rank0=True) if model else {}
        states = optimizer.with_other_stages(shares, gather_to_rank0=True) if optimizer and shares else {}
        if pp_rank() == 0:
            _write_user(user, directory / _user_of(tag))
            if optimizer:
                _write(states, directory / f"optimizer_{tag}")
            if model:
                _write(whole, directory / tag)
            _note_newest(directory, tag, partial=False)


def _resume_partial(directory: Path, strict: bool, load_optimizer: bool, weights_only: bool | None) -> Any:
    _finish_rename(directory)
    if not any((*directory.glob("model_*.pt"), *directory.glob("optimizer_*.pt"))):
        raise SMPRuntimeError(f"There is no partial checkpoint {directory}: it holds {_listing(directory.parent)}.")
    kinds = {kind: sorted(directory.glob(f"{kind}_*.pt")) for kind in ("model", "optimizer")}
    if _is_placed_so(directory):
        kinds = {kind: [directory / f"{kind}_{pp_rank()}.pt"] if files else [] for kind, files in kinds.items()}
    model: dict[str, Any] = {}
    for file in kinds["model"]:
        model.update(_read(file, weights_only=weights_only))
    if model:
        state.the_model().load_state_dict(model, strict)
    if load_optimizer and state.optimizer is not None and kinds["optimizer"]:
        parts = [_read(file, weights_only=weights_only) for file in kinds["optimizer"]]
        state.optimizer.load_state_dict(_joined(parts))
    return _read_user(directory, "", weights_only)


def _is_placed_so(directory: Path) -> bool:
    """Whether modules are, or now will be, on the stages that they had when this checkpoint was saved."""
    saved = directory / _STAGES
    if not saved.is_file():  # of before, or of an optimizer alone
        return False
    placed = json.loads(saved.read_text())
    return placed["partitions"] == pp_size() and state.the_model().fix_stages(placed["stages"])


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """One optimizer's state dict of those of all stages, whose parameters may have other numbers here."""
    numbers = {name: number for number, name in _names().items()}

    def here(key: str) -> dict[int, Any]:
        return {
            numbers[part["names"][number]]: value
            for part in parts
            for number, value in part.get(key, {}).items()
            if part["names"].get(number) in numbers
        }

    return {**parts[0], "state": here("state"), "masters": here("masters")}


def _names() -> dict[int, str]:
    """The names of the parameters by their numbers in the script's optimizer."""
    assert state.optimizer is not None
    names = {id(parameter): name for name, parameter in state.the_model().named_parameters()}
    masters = {id(master): names.get(id(p), "") for p, master in state.optimizer.masters.items()}
    parameters = (p for group in state.optimizer.param_groups for p in group["params"])
    return {number: {**names, **masters}.get(id(p), str(number)) for number, p in enumerate(parameters)}


def _drop_old(directory: Path, kept: int | None) -> None:
    if kept is None:
        return
    partial = sorted(_partial(directory), key=lambda path: path.stat().st_mtime_ns)
    for path in partial[: max(0, len(partial) - max(1, kept))]:
        shutil.rmtree(path)


def _partial(directory: Path) -> Iterator[Path]:
    return (path for path in directory.glob("*_partial") if path.is_dir() and not path.name.startswith("."))


def _finish_rename(directory: Path) -> None:
    """A job killed between the two renames has left the one before under another name. All ranks call this."""
    old = directory.with_name(f".{directory.name}.old")
    if not directory.exists() and old.is_dir():
        with suppress(FileNotFoundError):  # another rank was faster
            old.rename(directory)


def _kind(partial: bool) -> str:
    return "partial" if partial else "full"


def _note_newest(directory: Path, tag: str, partial: bool) -> None:
    for name in (f"{_NEWEST}_{_kind(partial)}", _NEWEST):
        _write_text(directory / name, tag)


def _newest(directory: Path, partial: bool) -> str:
    """The newest tag of its kind; directories of before have but one of both kinds."""
    for file in (directory / f"{_NEWEST}_{_kind(partial)}", directory / _NEWEST):
        if file.is_file():
            return file.read_text()
    raise SMPRuntimeError(f"There is no {_kind(partial)} checkpoint in {directory}: it holds {_listing(directory)}.")


def _listing(directory: Path) -> str:
    return ", ".join(sorted(path.name for path in directory.glob("*"))) or "nothing"


def _write(obj: Any, path: Path, **options: Any) -> None:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    with unfinished.open("wb") as file:
        torch.save(obj, file, **options)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def _write_text(path: Path, text: str) -> None:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    unfinished.write_text(text)
    unfinished.replace(path)


def _write_user(user: Any, path: Path) -> None:
    """Warns if the content will not be loaded unless the script says so: now, and not only when it resumes."""
    _write(user, path)
    try:
        torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        warnings.warn(
            f"user_content holds more than tensors, numbers, words and containers of them ({_first_line(error)}): to "
            f"resume, give smp.resume_from_checkpoint weights_only=False, or set {_TRUST}=1.",
            stacklevel=2,
        )


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _read_weights(path: Path, weights_only: bool | None) -> Any:
    if path.name != _SAFE_WEIGHTS:
        return _read(path, weights_only=weights_only)
    from safetensors.torch import load_file

    return load_file(path)


def _user_of(tag: str) -> str:
    return f"user_content_{tag}"


def _read_user(directory: Path, tag: str, weights_only: bool | None) -> Any:
    """What the script saved with a checkpoint. Before, full ones had other names; Trainer leaves it empty."""
    own = [directory / _user_of(tag), directory / f"{_user_of(tag)}.pt"] if tag else []
    path = next((path for path in own if path.is_file()), directory / _USER)
    return _read(path, weights_only=weights_only) if path.is_file() and path.stat().st_size else None


def _read(path: Path, map_location: Any = "cpu", weights_only: bool | None = None, **options: Any) -> Any:
    if not path.is_file():
        raise SMPRuntimeError(f"There is no {path}: {path.parent} holds {_listing(path.parent)}.")
    only = not _trusts_checkpoints() if weights_only is None else weights_only
    try:
        return torch.load(path, map_location=map_location, weights_only=only, **options)
    except pickle.UnpicklingError as error:
        if not only:
            raise
        raise SMPRuntimeError(
            f"{path} holds more than tensors, numbers, words and containers of them, or is damaged: "
            f"{_first_line(error)} Loading any object runs code of whoever wrote the file. Fix: if you trust them, "
            "give smp.load or smp.resume_from_checkpoint weights_only=False, or set the environment variable "
            f"{_TRUST}=1."
        ) from error


def _trusts_checkpoints() -> bool:
    text = os.environ.get(_TRUST, "")
    if text not in _TRUSTS:
        raise SMPRuntimeError(
            f"{_TRUST} is {text!r}. Fix: set it to 1 to load any objects from checkpoints, or unset it."
        )
    return _TRUSTS[text]
