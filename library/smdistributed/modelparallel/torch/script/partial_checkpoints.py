"""Partial checkpoints: a directory with a file for each stage.

A checkpoint is written to another directory, which is renamed when it is complete: a job that is killed leaves the one
before. Parameters have their names in it, so that another number of stages can read it.

It notes which stage has which module. With as many stages, a model that is not placed yet is placed as it was. A rank
then reads the files of its stage alone. Every rank reads the files of all stages if the number of stages differs, or if
modules are placed differently or have other names. It also does for an old checkpoint, which lacks the placement.

It also notes how many steps the job had made, because the random numbers of a step depend on it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from smdistributed.modelparallel.backend.api import barrier, dp_rank, pp_rank, pp_size
from smdistributed.modelparallel.backend.exceptions import SMPRuntimeError
from smdistributed.modelparallel.torch.script.checkpoint_files import (
    TAG_FIX,
    list_files,
    read_object,
    remove,
    write_newest,
    write_object,
    write_text,
    write_user_content,
)
from smdistributed.modelparallel.torch.script.model import DistributedModel, script_model
from smdistributed.modelparallel.torch.script.optimizer import DistributedOptimizer
from smdistributed.modelparallel.torch.script.sharding import join_parts
from smdistributed.modelparallel.torch.script.state import TorchState

USER_CONTENT = "user_content.pt"
_STAGES, _SEEN = "stages.json", ".seen_by_"


def save_partial(
    state: TorchState,
    directory: Path,
    tag: str,
    model: DistributedModel | None,
    optimizer: DistributedOptimizer | None,
    content: Any,
) -> bool:
    """Saves a partial checkpoint and notes it as the newest. Every rank calls it, and waits for the others.

    A checkpoint with this tag is replaced. Returns whether this rank is the first of those that see `directory`: it
    renames and removes checkpoints there.
    """
    final, unfinished = directory / f"{tag}_partial", directory / f".{tag}_partial.unfinished"
    leads = _make_empty(state, unfinished)
    _write_stage(unfinished, state, model, optimizer)
    if leads:
        write_user_content(content, unfinished / USER_CONTENT)
        shards = state.cfg.sharded_data_parallel_degree
        if model or shards > 1:
            stages = script_model(state).manager.stages
            notes = {"partitions": state.cfg.partitions, "stages": stages, "steps": state.stage.all_steps}
            notes["shards"] = shards
            write_text(unfinished / _STAGES, json.dumps(notes))
    barrier()
    if leads:
        for mark in unfinished.glob(f"{_SEEN}*"):
            mark.unlink()
        old = directory / f".{tag}_partial.old"
        remove(old)
        if os.path.lexists(final):
            final.rename(old)
        unfinished.rename(final)
        write_newest(directory, tag, "partial")
        remove(old)
    return leads


def load_partial(
    state: TorchState,
    directory: Path,
    tag: str,
    strict: bool,
    load_optimizer: bool,
    weights_only: bool | None,
    masters_only: bool = False,
) -> Path:
    """Loads a partial checkpoint into the script's model and optimizer. Every rank calls it. Returns its directory.

    A checkpoint that a killed job has renamed and not replaced is restored first. If the checkpoint lacks a model or an
    optimizer, that keeps its values. Dropout goes on as in the job that saved it, with the same seed.

    `masters_only`: of the optimizer's state, load only single-precision copies and the loss scale.

    If the model is not placed yet, both are loaded when it is, and errors of `strict` (RuntimeError) come then. It
    takes the stages of the checkpoint, if it can. Raises SMPRuntimeError if there is no such checkpoint, or a file
    holds more than `weights_only` allows.
    """
    own = directory / f"{tag}_partial"
    finish_rename(own)
    files = {kind: sorted(own.glob(f"{kind}_*.pt"), key=_number_in) for kind in ("model", "optimizer")}
    if not any(files.values()):
        raise SMPRuntimeError(
            f"There is no partial checkpoint {own.name} in {own.parent}: it holds {list_files(own.parent)}. {TAG_FIX}"
        )
    notes = _read_notes(own)
    state.stage.resume(notes.get("steps", state.stage.all_steps))
    shards = notes.get("shards", 1)
    if _has_same_stages(state, notes) and shards == state.cfg.sharded_data_parallel_degree:
        shards = 1
        files = {kind: [own / f"{kind}_{_place(state)}.pt"] if found else [] for kind, found in files.items()}
    parameters: dict[str, Any] = {}
    for part in _read_parts(files["model"], shards, weights_only):
        parameters.update(part)
    if parameters:
        script_model(state).load_state_dict(parameters, strict)
    if load_optimizer and state.optimizer is not None and files["optimizer"]:
        parts = _read_parts(files["optimizer"], shards, weights_only)
        merged = _merge_parts(parts, _parameter_names(state))
        if masters_only:
            del merged["state"]
        state.optimizer.load_state_dict(merged)
    return own


def _read_parts(files: Sequence[Path], shards: int, weights_only: bool | None) -> list[dict[str, Any]]:
    """Returns the contents of files. If there are several `shards`, joins them. Raises SMPRuntimeError if one lacks."""
    parts = [read_object(file, weights_only=weights_only) for file in files]
    if shards > 1 and len(parts) not in (0, shards):
        raise SMPRuntimeError(
            f"{files[0].parent} has {len(parts)} of the {shards} files of a sharded job. Fix: copy the files of all "
            "hosts there, or resume with the same 'sharded_data_parallel_degree'."
        )
    return [join_parts(parts)] if shards > 1 and parts else parts


def _place(state: TorchState) -> int:
    """The number in the names of this rank's files: its stage, or its shard, of which there is one stage."""
    shards = script_model(state).shards
    return shards.index if shards else pp_rank()


def remove_old(directory: Path, kept: int | None) -> None:
    """The newest are the directories that were modified last. At least one stays; with `kept` None all stay."""
    if kept is None:
        return
    partial = sorted(_list_partial(directory), key=lambda path: path.stat().st_mtime_ns)
    for path in partial[: max(0, len(partial) - max(1, kept))]:
        remove(path)


def finish_rename(directory: Path) -> None:
    """Restores the checkpoint that a job has renamed and not replaced, because it was killed. All ranks call it."""
    old = directory.with_name(f".{directory.name}.old")
    if not directory.exists() and old.is_dir():
        with suppress(FileNotFoundError):  # another rank was faster
            old.rename(directory)


def _write_stage(
    directory: Path, state: TorchState, model: DistributedModel | None, optimizer: DistributedOptimizer | None
) -> None:
    """Writes the files of this rank's stage or shard, on the first replica.

    All ranks call it: shares of `shard_optimizer_state` and of tensor parallelism are gathered.
    """
    shards = script_model(state).shards
    is_first = shards.is_first_replica if shards else dp_rank() == 0
    own = optimizer.local_state_dict(gather_if_shard=shards is None) if optimizer else None  # from all replicas
    gathered = optimizer.join_shares(own) if optimizer and own else None
    tensors = model.join_shares(model.local_state_dict()) if model else None
    if is_first and tensors is not None:
        write_object(tensors, directory / f"model_{_place(state)}.pt")
    if is_first and gathered is not None:
        write_object({**gathered, "names": _parameter_names(state)}, directory / f"optimizer_{_place(state)}.pt")


def _number_in(file: Path) -> tuple[int, str]:
    """Sorts shards by their number, and names without one last."""
    digits = file.stem.rpartition("_")[2]
    return (int(digits) if digits.isdecimal() else sys.maxsize), file.name


def _make_empty(state: TorchState, directory: Path) -> bool:
    """Makes an empty directory on every host; every rank calls it.

    Returns whether this rank is the first of those that see it: file systems are shared by all hosts, or by none.
    """
    if state.local_rank == 0:
        remove(directory)
    barrier()
    if state.local_rank == 0:
        directory.mkdir(exist_ok=True)
        (directory / f"{_SEEN}{state.rank}").touch()
    barrier()
    return state.rank == min(int(mark.name.removeprefix(_SEEN)) for mark in directory.glob(f"{_SEEN}*"))


def _read_notes(directory: Path) -> dict[str, Any]:
    """Raises SMPRuntimeError for stages or steps that no job has: ranks would wait for each other."""
    saved = directory / _STAGES
    if not saved.is_file():
        return {}
    try:
        notes: dict[str, Any] = json.loads(saved.read_text())
        steps, count, stages = notes.get("steps", 0), notes.get("partitions", 1), notes.get("stages", {})
        is_placed = all(type(each) is int and 0 <= each < count for each in stages.values())
        is_placed &= type(notes.get("shards", 1)) is int and notes.get("shards", 1) > 0
        if is_placed and type(steps) is int and steps >= 0:
            return notes
        problem = "wrong stages or steps"
    except (AttributeError, RecursionError, TypeError, ValueError) as error:
        problem = str(error)
    raise SMPRuntimeError(f"{saved} is damaged ({problem}). Fix: remove it, and the model is placed again.")


def _has_same_stages(state: TorchState, notes: dict[str, Any]) -> bool:
    """If nothing is decided yet, the model keeps these stages for its first call. False for old checkpoints."""
    return notes.get("partitions") == pp_size() and script_model(state).adopt_stages(notes["stages"])


def _merge_parts(parts: list[dict[str, Any]], names: dict[int, str]) -> dict[str, Any]:
    """Uses this job's numbers. States of parameters unknown here are dropped; other keys are the first stage's."""
    numbers = {name: number for number, name in names.items()}

    def renumber(key: str) -> dict[int, Any]:
        return {
            numbers[part["names"][number]]: value
            for part in parts
            for number, value in part.get(key, {}).items()
            if part["names"].get(number) in numbers
        }

    return {**parts[0], "state": renumber("state"), "masters": renumber("masters")}


def _parameter_names(state: TorchState) -> dict[int, str]:
    """Returns names by the numbers in the optimizer. A parameter that is not in the model has its number as name."""
    assert state.optimizer is not None
    weights = state.optimizer.master_weights
    names = {id(parameter): name for name, parameter in script_model(state).named_parameters()}
    originals = weights.model_parameters(weights.parameters())
    return {number: names.get(id(parameter), str(number)) for number, parameter in enumerate(originals)}


def _list_partial(directory: Path) -> Iterator[Path]:
    """Yields the directories of complete partial checkpoints, in any order."""
    return (path for path in directory.glob("*_partial") if path.is_dir() and not path.name.startswith("."))
