"""Partial checkpoints: a directory with files of safetensors, in which each rank has written its own parts.

A checkpoint is written to another directory, which is renamed when it is complete: a job that is killed leaves the one
before. See `checkpoint_parts` for the files, which any layout can read.

It notes which stage has which module. With as many stages, a model that is not placed yet is placed as it was. It also
notes how many steps the job had made, because the random numbers of a step depend on it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from smdistributed.modelparallel.backend.api import barrier, pp_rank, pp_size, rdp_rank, tp_rank
from smdistributed.modelparallel.backend.exceptions import SMPRuntimeError
from smdistributed.modelparallel.torch.script.aws_checkpoints import is_from_aws, read_from_aws, refuse_optimizer
from smdistributed.modelparallel.torch.script.checkpoint_files import (
    TAG_FIX,
    list_files,
    remove,
    write_newest,
    write_text,
    write_user_content,
)
from smdistributed.modelparallel.torch.script.checkpoint_parts import (
    read_model,
    read_optimizer,
    write_model,
    write_optimizer,
)
from smdistributed.modelparallel.torch.script.model import DistributedModel, script_model
from smdistributed.modelparallel.torch.script.optimizer import DistributedOptimizer
from smdistributed.modelparallel.torch.script.state import TorchState
from smdistributed.modelparallel.torch.script.tensor_files import TensorFiles

USER_CONTENT = "user_content.pt"
_STAGES, _SEEN, _SUFFIX = "stages.json", ".seen_by_", ".safetensors"


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
    _write_own(unfinished, model, optimizer)
    if leads:
        write_user_content(content, unfinished / USER_CONTENT)
        if model:
            notes = {"partitions": state.cfg.partitions, "stages": model.manager.stages}
            notes["steps"] = state.stage.all_steps
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

    If the model is not placed yet, both are loaded when it is, and errors of `strict` (RuntimeError) come then: the
    files must stay there. It takes the stages of the checkpoint, if it can. Raises SMPRuntimeError if there is no such
    checkpoint, a file is damaged, or holds more than `weights_only` allows.
    """
    own = directory / f"{tag}_partial"
    finish_rename(own)
    files = {kind: TensorFiles(own.glob(f"{kind}_*{_SUFFIX}")) for kind in ("model", "optimizer")}
    if not any(map(len, files.values())) and is_from_aws(own):
        if load_optimizer and state.optimizer is not None:
            refuse_optimizer(own)
        model = script_model(state)
        model.load_when_placed(lambda: read_from_aws(model, own, strict, weights_only))
        return own
    if not any(map(len, files.values())):
        raise SMPRuntimeError(
            f"There is no partial checkpoint {own.name} in {own.parent}: it holds {list_files(own.parent)}. {TAG_FIX}"
        )
    notes, model, optimizer = _read_notes(own), script_model(state), state.optimizer
    state.stage.resume(notes.get("steps", state.stage.all_steps))
    if notes.get("partitions") == pp_size():
        model.adopt_stages(notes.get("stages", {}))
    if files["model"]:
        model.load_when_placed(lambda: read_model(model, files["model"], strict, weights_only))
    if load_optimizer and isinstance(optimizer, DistributedOptimizer) and files["optimizer"]:
        model.when_placed(lambda *_: read_optimizer(optimizer, files["optimizer"], masters_only, weights_only))
    return own


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


def _write_own(directory: Path, model: DistributedModel | None, optimizer: DistributedOptimizer | None) -> None:
    """Writes the files of this rank. All ranks call it."""
    place = f"{pp_rank()}_{tp_rank()}_{rdp_rank()}{_SUFFIX}"
    if model:
        write_model(model, directory / f"model_{place}")
    if optimizer:
        write_optimizer(optimizer, directory / f"optimizer_{place}")


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
        if is_placed and type(steps) is int and steps >= 0:
            return notes
        problem = "wrong stages or steps"
    except (AttributeError, RecursionError, TypeError, ValueError) as error:
        problem = str(error)
    raise SMPRuntimeError(f"{saved} is damaged ({problem}). Fix: remove it, and the model is placed again.")


def _list_partial(directory: Path) -> Iterator[Path]:
    """Yields the directories of complete partial checkpoints, in any order."""
    return (path for path in directory.glob("*_partial") if path.is_dir() and not path.name.startswith("."))
