"""`smp.save`, `smp.load`, `smp.save_checkpoint` and `smp.resume_from_checkpoint` (AWS API).

Full checkpoints are ordinary state dicts, which plain PyTorch loads. See `partial_checkpoints` for the others.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from smdistributed.core.options import only_known, warn_without_effect
from smdistributed.modelparallel.backend.api import barrier, dp_rank, mp_rank, pp_rank, rdp_rank, tp_rank, tp_size
from smdistributed.modelparallel.backend.exceptions import SMPRuntimeError
from smdistributed.modelparallel.torch.script.checkpoint_files import (
    SAFE_WEIGHTS,
    TAG_FIX,
    TORCH_WEIGHTS,
    list_files,
    read_mapped,
    read_newest,
    read_object,
    read_weights,
    write_newest,
    write_object,
    write_user_content,
)
from smdistributed.modelparallel.torch.script.model import DistributedModel, script_model
from smdistributed.modelparallel.torch.script.optimizer import DistributedOptimizer
from smdistributed.modelparallel.torch.script.partial_checkpoints import (
    USER_CONTENT,
    load_partial,
    remove_old,
    save_partial,
)
from smdistributed.modelparallel.torch.script.state import state


@only_known
def save(
    obj: Any,
    f: str | os.PathLike[str],
    partial: bool = True,
    pickle_module: Any = pickle,
    pickle_protocol: int = 2,
    v3: bool = False,
) -> None:
    """Saves an object to a file (AWS API).

    Args:
        obj: The object.
        f: The file. With `partial`, the object goes to `f_{mp_rank}`, and every stage calls this. With tensor
            parallelism it goes to `f_{pp_rank}_{tp_rank}`, and every rank of a replica calls this.
        partial: Whether each stage saves a file of its own.
        pickle_module: See torch.save.
        pickle_protocol: See torch.save.
        v3: Whether replicas save different objects, as with `shard_optimizer_state`: the file is then
            `f_{pp_rank}_{tp_rank}_{rdp_rank}`.
    """
    path = _of_this_replica(f) if partial and v3 else _of_this_stage(f) if partial else Path(f)
    write_object(obj, path, pickle_module=pickle_module, pickle_protocol=pickle_protocol)


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
    """Loads what `save` saved (AWS API). With `partial`, a file with `v3` of this rank wins over the stage's.

    Args:
        f: As for `save`.
        map_location: See torch.load.
        pickle_module: See torch.load. With another module than pickle, any object is loaded.
        pickle_load_args: More arguments of torch.load.
        partial: As for `save`.
        back_compat: No effect, and a warning: files of AWS's library before 1.10 cannot be read.
        weights_only: False: load any object, which runs code of the person who wrote the file. True: only tensors,
            numbers, strings and containers of them. None: True, unless SMP_TRUST_CHECKPOINTS is 1. Ours.

    Returns:
        The object.

    Raises:
        SMPRuntimeError: If there is no such file, it holds more than `weights_only` allows, or before `smp.init`.
    """
    if back_compat:
        warn_without_effect("back_compat of smp.load", "optimizer files of AWS's library before 1.10 cannot be read")
    options = {"weights_only": weights_only, **(pickle_load_args or {})}
    if pickle_module is not pickle:
        options = {"weights_only": False, "pickle_module": pickle_module, **(pickle_load_args or {})}
    own = _of_this_replica(f)
    path = Path(f) if not partial else own if own.is_file() else _of_this_stage(f)
    return read_object(path, map_location, **options)


def _of_this_stage(f: str | os.PathLike[str]) -> Path:
    return Path(f"{os.fspath(f)}_{mp_rank()}" if tp_size() == 1 else f"{os.fspath(f)}_{pp_rank()}_{tp_rank()}")


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
    """Saves a checkpoint; every rank calls it, and waits for the others (AWS API).

    Hosts need no shared file system. Without one, each has the files of its own stages, as in SageMaker's
    /opt/ml/checkpoints, which SageMaker collects.

    Args:
        path: The directory of checkpoints. It is made if it does not exist.
        tag: The name of this one.
        partial: True: a directory `{tag}_partial` with a file for each stage. False: the model's state dict in the file
            `tag`, and the optimizer's in `optimizer_{tag}`.
        model: Its parameters and buffers are saved.
        optimizer: Its state is saved.
        user_content: Anything that can be pickled; `resume_from_checkpoint` returns it. It warns if loading it will
            require `weights_only=False`.
        translate_if_full: Whether Hugging Face's models that are tensor-parallel have Hugging Face's names in a full
            checkpoint. Other models have their own names.
        num_kept_partial_checkpoints: How many partial checkpoints to keep, the newest; None: all.

    Raises:
        SMPRuntimeError: If neither a model nor an optimizer is given.
    """
    if model is None and optimizer is None:
        raise SMPRuntimeError(
            f"save_checkpoint of {tag!r} has nothing to save. Fix: give a model, an optimizer or both."
        )
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    if partial:
        if save_partial(state, directory, tag, model, optimizer, user_content):
            remove_old(directory, num_kept_partial_checkpoints)
    else:
        _save_full(directory, tag, model, optimizer, user_content, translate_if_full)
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
    """Loads a checkpoint into the script's model and optimizer; every rank calls it (AWS API).

    It may be called before or after the first step. The number of stages may differ from the job that saved it.

    Args:
        path: The directory of checkpoints.
        tag: The name of the checkpoint; None: the newest of its kind.
        partial: Whether it is a partial one.
        strict: Whether missing and unexpected parameters are errors.
        load_optimizer: Whether the optimizer's state is loaded too.
        load_sharded_optimizer_state: False: of the optimizer's state in a partial checkpoint, load single-precision
            copies and the loss scale only. Without `sharded_data_parallel_degree` it has no effect, and warns.
        translate_function: For a full checkpoint: makes the model's state dict from the content of the file.
        load_optimizer_states: The name of `load_optimizer` before AWS API 1.11.
        weights_only: See `load`. Ours.

    Returns:
        The `user_content` of `save_checkpoint`; None if there is none.

    Raises:
        SMPRuntimeError: If there is no such checkpoint, a file holds more than `weights_only` allows, or
            `translate_function` is given for a partial one.
        RuntimeError: If `strict`, the model is placed, and keys are missing or unexpected.
    """
    masters_only = not load_sharded_optimizer_state
    if masters_only and state.cfg.sharded_data_parallel_degree == 1:
        masters_only, what = False, "load_sharded_optimizer_state of smp.resume_from_checkpoint"
        warn_without_effect(what, "it is for 'sharded_data_parallel_degree' above 1")
    load_optimizer = load_optimizer if load_optimizer_states is None else load_optimizer_states
    directory = Path(path)
    tag = tag or read_newest(directory, "partial" if partial else "full")
    if not partial:
        _load_full(directory, tag, strict, load_optimizer, translate_function, weights_only)
        return _read_user_content(directory, tag, weights_only)
    if translate_function is not None:
        raise SMPRuntimeError("translate_function is for full checkpoints. Fix: leave it out, or give partial=False.")
    own = load_partial(state, directory, tag, strict, load_optimizer, weights_only, masters_only)
    return _read_user_content(own, "", weights_only)


def _save_full(
    directory: Path,
    tag: str,
    model: DistributedModel | None,
    optimizer: DistributedOptimizer | None,
    content: Any,
    translate: bool,
) -> None:
    """All ranks call it. Only rank 0 of the first replica writes files."""
    gathered = optimizer.join_shares(optimizer.local_state_dict()) if optimizer else None  # from all replicas
    is_sharded = state.cfg.sharded_data_parallel_degree > 1  # then all ranks have a part
    if rdp_rank() == 0 or is_sharded:
        whole = model.state_dict(gather_to_rank0=True) if model else {}
        states = optimizer.with_other_stages(gathered, gather_to_rank0=True) if optimizer and gathered else {}
        if pp_rank() == 0 and dp_rank() == 0:
            write_user_content(content, directory / _user_content_of(tag))
            if optimizer:
                write_object(states, directory / f"optimizer_{tag}")
            if model:
                for to_other, _ in model.manager.translate_functions if translate else ():
                    whole = to_other(whole)
                write_object(whole, directory / tag)
            write_newest(directory, tag, "full")


def _load_full(
    directory: Path,
    tag: str,
    strict: bool,
    load_optimizer: bool,
    translate: Callable[[Any], Any] | None,
    weights_only: bool | None,
) -> None:
    """Loads on this rank. The tag pytorch_model.bin means model.safetensors if there is no file of that name.

    Without a file of the optimizer, its state stays. Raises SMPRuntimeError if there is no such file, or it holds more
    than `weights_only` allows.
    """
    weights = directory / tag
    if not weights.is_file() and tag == TORCH_WEIGHTS:
        weights = directory / SAFE_WEIGHTS
    if not weights.is_file():
        raise SMPRuntimeError(
            f"There is no full checkpoint {tag!r} in {directory}: it holds {list_files(directory)}. {TAG_FIX}"
        )
    found = read_weights(weights, weights_only)
    script_model(state).load_state_dict(translate(found) if translate else found, strict)
    saved = directory / f"optimizer_{tag}"
    if load_optimizer and state.optimizer is not None and saved.is_file():
        state.optimizer.load_state_dict(read_mapped(saved, weights_only))


def _user_content_of(tag: str) -> str:
    return f"user_content_{tag}"


def _read_user_content(directory: Path, tag: str, weights_only: bool | None) -> Any:
    """Returns None if there is none or the file is empty. Old full checkpoints have other names."""
    own = [directory / _user_content_of(tag), directory / f"{_user_content_of(tag)}.pt"] if tag else []
    path = next((path for path in own if path.is_file()), directory / USER_CONTENT)
    return read_object(path, weights_only=weights_only) if path.is_file() and path.stat().st_size else None
