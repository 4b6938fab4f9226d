"""Directories of checkpoints that somebody else wrote: whatever is in them, a save harms no file, and a load ends."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from shoal_checkpoint.directories import SavedSteps
from shoal_checkpoint.torch import Checkpoint, CheckpointError, storage

pytestmark = pytest.mark.timeout(60)  # a pipe would be waited for


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file of the user that has nothing to do with any checkpoint."""
    (tmp_path / "victim").write_text("precious")
    return tmp_path / "victim"


def open_checkpoint(directory: Path, **options: Any) -> Checkpoint:
    return Checkpoint(directory, model=torch.nn.Linear(2, 2), asynchronous=False, **options)


def save(directory: Path) -> Path:
    for _ in open_checkpoint(directory, own={"best": 0}).epochs(1):
        pass
    return directory / "step-00000000"


def forge(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what a checkpoint says about the training."""
    tensors = storage.read(path)
    saved = pickle.loads(tensors[storage.STRUCTURE].numpy().tobytes())
    change(saved["state"])
    tensors[storage.STRUCTURE] = storage._to_tensor(saved)
    shutil.rmtree(path)
    storage.write(tensors, path)


LOCKS: dict[str, Callable[[Path, Path], object]] = {
    "link": lambda lock, victim: lock.symlink_to(victim),
    "link-to-nothing": lambda lock, victim: lock.symlink_to(victim.with_name("new")),
    "pipe": lambda lock, _: os.mkfifo(lock),
    "directory": lambda lock, _: lock.mkdir(),
}


@pytest.mark.parametrize("make", LOCKS.values(), ids=LOCKS)
def test_a_lock_that_leads_elsewhere_is_not_written(
    tmp_path: Path, victim: Path, make: Callable[[Path, Path], object]
) -> None:
    directory = tmp_path / "c"
    directory.mkdir()
    make(directory / ".lock", victim)
    with pytest.raises(CheckpointError, match=r"\.lock: checkpoints cannot be written here: .*Fix: "):
        open_checkpoint(directory)
    assert victim.read_text() == "precious"
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o600), (0o002, 0o660), (0o077, 0o600)])
@pytest.mark.parametrize("is_old", [True, False])
def test_who_cannot_write_checkpoints_cannot_lock_them(tmp_path: Path, umask: int, mode: int, is_old: bool) -> None:
    """A reader of the file could lock it, and no save would begin. An earlier version has left it readable."""
    before = os.umask(umask)
    try:
        if is_old:
            (tmp_path / ".lock").touch()
        SavedSteps(tmp_path, 1).lock()
    finally:
        os.umask(before)
    assert (tmp_path / ".lock").stat().st_mode & 0o777 == mode


PIPES = [".metadata", "__0_0.distcp"]


@pytest.mark.parametrize("name", PIPES)
def test_a_pipe_in_a_checkpoint_is_not_waited_for(tmp_path: Path, name: str) -> None:
    path = save(tmp_path)
    if name != ".metadata":  # which says that no byte of the other file is needed
        metadata = pickle.loads((path / ".metadata").read_bytes())
        for place in metadata.storage_data.values():
            place.offset = place.length = 0
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
    (path / name).unlink()
    os.mkfifo(path / name)
    with pytest.raises(CheckpointError, match=rf"{name}.* (cannot be read|is missing).*Fix: "):
        open_checkpoint(tmp_path, own={})


def link_data_to(device: str) -> Callable[[Path], None]:
    def change(data: Path) -> None:
        data.unlink()
        data.symlink_to(device)

    return change


def place_data(offset: int, length: int) -> Callable[[Path], None]:
    def change(data: Path) -> None:
        metadata = pickle.loads((data.parent / ".metadata").read_bytes())
        for each in metadata.storage_data.values():
            each.offset, each.length = offset, length
        (data.parent / ".metadata").write_bytes(pickle.dumps(metadata))

    return change


DATA = {
    "endless": link_data_to("/dev/zero"),
    "before the beginning": place_data(-5, 10),
    "without an end": place_data(0, -1),
    "behind the end": place_data(2**62, 2**62),
}


@pytest.mark.parametrize("change", DATA.values(), ids=DATA)
def test_odd_places_of_data_are_an_error(tmp_path: Path, change: Callable[[Path], None]) -> None:
    change(save(tmp_path) / "__0_0.distcp")
    with pytest.raises(CheckpointError, match=r"(cannot be read|is truncated|is missing).*Fix: "):
        open_checkpoint(tmp_path, own={})


LEFT: dict[str, Callable[[Path, Path], object]] = {
    "partial-link": lambda directory, victim: (directory / "step-9.partial").symlink_to(victim.parent),
    "partial-file": lambda directory, _: (directory / "step-9.partial").touch(),
    "partial-pipe": lambda directory, _: os.mkfifo(directory / "step-9.partial"),
    "other-digits": lambda directory, _: (directory / "step-\u0669").mkdir(),
    "short-name": lambda directory, _: (directory / "step-7").mkdir(),
    "long-name": lambda directory, _: (directory / f"step-{'9' * 200}").mkdir(),
    "same-number": lambda directory, _: (directory / "step-000000000").mkdir(),
}


@pytest.mark.parametrize("make", LEFT.values(), ids=LEFT)
def test_what_lies_beside_checkpoints_ends_no_training(
    tmp_path: Path, victim: Path, make: Callable[[Path, Path], object]
) -> None:
    directory = tmp_path / "c"
    save(directory)
    make(directory, victim)
    checkpoint = open_checkpoint(directory, own={})
    checkpoint.step = 1
    checkpoint.save()
    assert (directory / "step-00000001" / ".metadata").exists()
    assert victim.read_text() == "precious"


def test_a_link_in_the_place_of_an_old_checkpoint_loses_only_the_link(tmp_path: Path) -> None:
    directory, elsewhere = tmp_path / "c", tmp_path / "elsewhere"
    save(directory).rename(elsewhere)
    (directory / "step-00000000").symlink_to(elsewhere)
    checkpoint = open_checkpoint(directory, own={}, keep=1)
    checkpoint.step = 1
    checkpoint.save()
    assert [path.name for path in directory.glob("step-*")] == ["step-00000001"]
    assert (elsewhere / ".metadata").exists()


def forge_place(name: str, value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda state: state["shoal"]["position"].update({name: value})


FORGED: dict[str, Callable[[dict[str, Any]], object]] = {
    "negative-epoch": forge_place("epoch", -2),
    "negative-step": forge_place("step", -9),
    "negative-batches": forge_place("batches", -3),
    "nan": forge_place("batches", float("nan")),
    "text": forge_place("step", "9"),
    "truth": forge_place("epoch", True),
    "unit": forge_place("unit", -1),
    "no-position": lambda state: state["shoal"].pop("position"),
    "nothing": lambda state: state.clear(),
    "no-ranks": lambda state: state["shoal"].update(ranks=[]),
    "another-dict": lambda state: state["shoal"]["ranks"][0].update(dicts={"nowhere": {"a": 1}}),
    "a-number": lambda state: state.update(shoal=5),
}


@pytest.mark.parametrize("change", FORGED.values(), ids=FORGED)
def test_a_forged_place_is_an_error_with_a_fix(tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = save(tmp_path)
    forge(path, change)
    with pytest.raises(CheckpointError, match=rf"(?s){path}.*Fix: move {path} away"):
        open_checkpoint(tmp_path, own={})


@pytest.mark.parametrize("number", [-7, 625, 10**8])
def test_random_states_make_numpy_read_nothing_beyond_its_memory(tmp_path: Path, number: int) -> None:
    """NumPy does not check the place in the state: 10^8 ends the process with SIGSEGV."""
    path = save(tmp_path)

    def change(state: dict[str, Any]) -> None:
        states: dict[str, Any] = state["shoal"]["ranks"][0]["now"]["random"]
        states["numpy"] = (*states["numpy"][:2], number, *states["numpy"][3:])

    forge(path, change)
    before = str(numpy.random.get_state())
    with pytest.raises(CheckpointError, match=f"at place {number} of 624"):
        next(open_checkpoint(tmp_path, own={}).epochs(2))
    assert str(numpy.random.get_state()) == before
