"""shoal_checkpoint with PyTorch: a killed training goes on exactly, and bad checkpoints are refused."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.repeats import SEED, times
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import shoal_checkpoint as contract
from shoal_checkpoint.directories import CheckpointError, SavedSteps
from shoal_checkpoint.position import Split, batches_to_skip
from shoal_checkpoint.torch import Checkpoint
from shoal_checkpoint.torch.batches import ExactLoader

if TYPE_CHECKING:
    from tests.launching import Alone, StartRanks, TwoRanks


@pytest.fixture(autouse=True)
def _own_handler() -> Iterator[None]:
    """Give this process its handler of SIGTERM back, and forget that there was one."""
    before, state = signal.getsignal(signal.SIGTERM), dict(vars(contract._Stop))
    yield
    signal.signal(signal.SIGTERM, before)
    for name in ("installed", "received", "before"):
        setattr(contract._Stop, name, state[name])


RESUMING, ELASTIC = (Path(__file__).parent / "ranks" / name for name in ("resuming.py", "elastic.py"))
LIMIT_S = 120


def new_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def steps_of(log: Path, rank: int) -> dict[str, str]:
    """Return a rank's lines by step; steps that were trained again have the same line, or this fails."""
    found: dict[str, str] = {}
    for line in Path(f"{log}-{rank}").read_text().splitlines():
        step, _, rest = line.partition(" ")
        assert found.setdefault(step, rest) == rest, f"step {step} of rank {rank} differs when it is trained again"
    return found


class Interrupted:
    """Starts ranks, and ends them in one of several ways, until a start trains to the end."""

    def __init__(self, start_ranks: TwoRanks, directory: Path, script: Path = RESUMING) -> None:
        self.start_ranks, self.script = start_ranks, script
        self.checkpoints, self.log = directory / "checkpoints", directory / "log"
        self.seconds = 0.0

    def start(self, interrupt: Callable[[list[subprocess.Popen[str]]], None], *options: object) -> list[int]:
        """Return the exit codes of the ranks."""
        with self.start_ranks(new_port(), self.script, self.checkpoints, self.log, *options) as ranks:
            began = time.monotonic()
            interrupt(ranks)
            codes = [rank.wait(LIMIT_S) for rank in ranks]
            self.seconds = time.monotonic() - began
            # The workers of a killed rank live for some seconds, and have its stdout.
            # SIGTERM before the handler is there, or when the interpreter ends, is an ordinary one.
            allowed = {0, -signal.SIGKILL, -signal.SIGTERM, contract.STOPPED}
            assert set(codes) <= allowed, [rank.communicate() for rank in ranks]
        return codes

    def kill_after(self, seconds: float) -> Callable[[list[subprocess.Popen[str]]], None]:
        def kill(ranks: list[subprocess.Popen[str]]) -> None:
            time.sleep(seconds)
            kill_all(ranks)

        return kill

    def kill_in_a_save(self, ranks: list[subprocess.Popen[str]]) -> None:
        self.wait_for("*.partial", ranks)
        kill_all(ranks)

    def stop_after_a_save(self, ranks: list[subprocess.Popen[str]]) -> None:
        self.wait_for("step-*[0-9]", ranks)
        for rank in ranks:
            rank.send_signal(signal.SIGTERM)

    def wait_for(self, pattern: str, ranks: list[subprocess.Popen[str]]) -> None:
        before = set(self.checkpoints.glob(pattern))
        while not set(self.checkpoints.glob(pattern)) - before and all(rank.poll() is None for rank in ranks):
            time.sleep(0.0005)


def kill_all(ranks: list[subprocess.Popen[str]]) -> None:
    for rank in ranks:
        rank.kill()


@pytest.mark.long
def test_a_killed_training_goes_on_as_if_it_had_not_been(two_ranks: TwoRanks, tmp_path: Path) -> None:
    """Two ranks of DistributedDataParallel, with workers that load ahead. Bit for bit, in each step, on each rank.

    Killed in the middle of two epochs, stopped, and killed in a save; in `make soak` also at random moments.
    """
    whole, killed = (Interrupted(two_ranks, tmp_path / name) for name in ("whole", "killed"))
    for each in (whole, killed):
        each.checkpoints.mkdir(parents=True)
    assert whole.start(lambda ranks: None) == [0, 0]
    for step in (5, 10):
        assert killed.start(lambda ranks: None, "--kill-at", step) == [-signal.SIGKILL] * 2
    drawn = random.Random(SEED)
    ways: list[Callable[[list[subprocess.Popen[str]]], None]] = [killed.stop_after_a_save, killed.kill_in_a_save]
    ways += [killed.kill_after(drawn.uniform(0, whole.seconds)) for _ in range(times(0, 50))]
    drawn.shuffle(ways)
    for way in ways:
        killed.start(way)
    assert killed.start(lambda ranks: None) == [0, 0]
    seen = [steps_of(whole.log, rank) for rank in range(2)]
    assert [steps_of(killed.log, rank) for rank in range(2)] == seen
    check_samples(seen)


def check_samples(seen: list[dict[str, str]]) -> None:
    """Each sample once in each epoch, over all ranks."""
    for epoch in range(3):
        lines = [line for rank in seen for line in rank.values() if line.startswith(f"{epoch} ")]
        found = [int(index) for line in lines for index in line.partition("[")[2].rstrip("]").split(",")]
        assert sorted(found) == list(range(96)), epoch


def test_a_stopped_training_goes_on_with_another_number_of_ranks(
    two_ranks: TwoRanks, alone: Alone, tmp_path: Path
) -> None:
    """SIGTERM in the middle of an epoch: both ranks save after the same step. The global batch stays the same."""
    stopped = Interrupted(two_ranks, tmp_path)
    stopped.checkpoints.mkdir()
    assert stopped.start(stopped.stop_after_a_save, "--pause", 0.05, "--every", 2) == [contract.STOPPED] * 2
    two = [steps_of(stopped.log, rank) for rank in range(2)]
    assert list(two[0]) == list(two[1]) and 2 < len(two[0]) < 18
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(new_port()), "RANK": "0", "WORLD_SIZE": "1"}
    alone(RESUMING, stopped.checkpoints, tmp_path / "one", "--batch-size", 16, **environ)
    one = steps_of(tmp_path / "one", 0)
    assert [*two[0], *one] == [*map(str, range(18)), "weights"]
    check_samples([*two, one])


@pytest.mark.once
@pytest.mark.long
def test_the_steps_are_the_same_with_4_ranks_then_3_then_4(
    start_ranks: StartRanks, alone: Alone, tmp_path: Path
) -> None:
    """As with one rank. 14 samples a step, 3 at most in a batch: 4 ranks have 4, 4, 3 and 3, and 3 have 5, 5, 4."""
    for count, pause in ((4, 0.1), (3, 0.1), (4, 0)):
        job = Interrupted(functools.partial(start_ranks, count), tmp_path, ELASTIC)
        job.log = tmp_path / f"log-{count}-{pause}"
        job.checkpoints.mkdir(exist_ok=True)
        codes = job.start(job.stop_after_a_save if pause else lambda ranks: None, pause)
        assert codes == [contract.STOPPED if pause else 0] * count
    one = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(new_port()), "RANK": "0", "WORLD_SIZE": "1"}
    alone(ELASTIC, tmp_path / "one", tmp_path / "alone", **one)
    expected, found = (elastic_steps(*tmp_path.glob(pattern)) for pattern in ("alone-*", "log-*"))
    assert list(expected) == list(found)
    for step, (loss, samples) in expected.items():
        assert found[step][0] == pytest.approx(loss, rel=1e-5), step
        assert found[step][1] == samples, step


def elastic_steps(*logs: Path) -> dict[str, tuple[float, list[int]]]:
    """Return the loss and the samples of each step, over all ranks."""
    steps: dict[str, tuple[float, list[int]]] = {}
    for step, loss, samples in sorted(line.split(maxsplit=2) for log in logs for line in log.read_text().splitlines()):
        before = (0.0, []) if step in ("total", "weights") else steps.get(step, (0.0, []))
        steps[step] = before[0] + float(loss), sorted([*before[1], *json.loads(samples)])
    return steps


class KilledError(Exception):
    """Ends a training in this process as a kill would: nothing is saved."""


def train(
    directory: Path | None,
    loader: Any,
    kill_at: int | None = None,
    accumulate: int = 1,
    global_batch: int | None = None,
    scaler: Any = None,
) -> list[tuple[int, str]]:
    """Train in this process; return the epoch and the loss of each batch."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    more = {"scaler": scaler} if scaler else {}
    checkpoint = Checkpoint(directory, every=2, model=model, optimizer=optimizer, **more)
    losses: list[tuple[int, str]] = []
    try:
        for epoch in checkpoint.epochs(2):
            for number, (values,) in enumerate(checkpoint.batches(loader, accumulate, global_batch), 1):
                if len(losses) == kill_at:
                    raise KilledError
                loss = model(values).square().mean() * (checkpoint.weight if global_batch else 1 / accumulate)
                (scaler.scale(loss) if scaler else loss).backward()
                last = number % accumulate == 0 or len(values) < 3  # the last one of an epoch
                if checkpoint.ends_step if global_batch else last:
                    if scaler:
                        scaler.step(optimizer)
                        scaler.update()
                    else:
                        optimizer.step()
                    optimizer.zero_grad()
                losses.append((epoch, loss.item().hex()))
    except KilledError:
        checkpoint._writer.wait()
    return losses


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for index in range(20):
            yield (torch.full((4,), index / 20),)


class Changed(Dataset[Any]):
    """Samples that a random transform changes, with each of the three generators."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[torch.Tensor]:
        return (torch.tensor([index / 32, torch.rand(()), np.random.random(), random.random()]),)


DATA = TensorDataset(torch.arange(80.0).reshape(20, 4) / 80)
LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: DataLoader(DATA, 3, shuffle=True),
    "generator": lambda: DataLoader(DATA, 3, shuffle=True, generator=torch.Generator().manual_seed(5)),
    "batch sampler": lambda: DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 3, drop_last=False)),
    "replacement": lambda: DataLoader(DATA, 3, sampler=RandomSampler(DATA, replacement=True, num_samples=20)),
    "stream": lambda: DataLoader(Stream(), 3),
    "persistent workers": lambda: DataLoader(DATA, 3, shuffle=True, num_workers=1, persistent_workers=True),
    "transforms in workers": lambda: DataLoader(Changed(), 3, shuffle=True, num_workers=2),
}


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        *((name, {}) for name in LOADERS),
        *((name, {"accumulate": 2}) for name in ("shuffled", "persistent workers")),
        *((name, {"global_batch": 6}) for name in ("shuffled", "generator", "transforms in workers")),
    ],
)
def test_every_loader_goes_on_exactly(tmp_path: Path, name: str, steps: dict[str, int]) -> None:
    """Killed at each of some batches, also of the second epoch, and started again."""
    check_exact(tmp_path, lambda directory, kill_at: train(directory, LOADERS[name](), kill_at, **steps))


@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [3, 3, 3, 3, 3, 3, 2]), (True, [3] * 6)])
def test_drop_last_leaves_out_the_step_without_a_whole_global_batch(drop_last: bool, sizes: list[int]) -> None:
    """6 samples in a step, and 20 in an epoch."""
    checkpoint = Checkpoint(None, model=model())
    loader = DataLoader(DATA, 3, drop_last=drop_last)
    for _ in checkpoint.epochs(2):
        assert [len(values) for (values,) in checkpoint.batches(loader, global_batch=6)] == sizes


def test_transforms_of_a_sample_are_the_same_with_any_number_of_ranks() -> None:
    """And differ between samples. The ranks' shares of one epoch are loaded one after the other."""

    def load(*splits: Split | None) -> dict[float, list[float]]:
        found: dict[float, list[float]] = {}
        for split in splits:
            torch.manual_seed(0)
            loader = ExactLoader(DataLoader(Changed(), 2, shuffle=True, num_workers=2))
            found |= {place: drawn for (values,) in loader.start(0, split) for place, *drawn in values.tolist()}
        return found

    one = load(Split(0, 20, 6, 0, 1, 2))
    assert load(*(Split(0, 20, 6, rank, 3, 2) for rank in range(3))) == one
    for found in (one, load(None)):
        assert len(found) == 20 and len({number for drawn in found.values() for number in drawn}) == 60


@pytest.mark.once  # the oldest torch has scalers for CUDA only
def test_a_scaler_goes_on_exactly(tmp_path: Path) -> None:
    """Its scale grows each 3 steps, and falls when gradients overflow."""
    scales: list[float] = []

    def train_scaled(directory: Path | None, kill_at: int | None) -> list[tuple[int, str]]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**125, growth_interval=3)
        losses = train(directory, LOADERS["shuffled"](), kill_at, scaler=scaler)
        scales.append(scaler.get_scale())
        return losses

    check_exact(tmp_path, train_scaled)
    assert scales[0] not in (2.0**125, scales[1]) and set(scales[2::2]) == {scales[0]}


def check_exact(directory: Path, train: Callable[[Path | None, int | None], list[tuple[int, str]]]) -> None:
    whole = train(None, None)
    assert len({float.fromhex(loss) for _, loss in whole}) == len(whole) == 14 and whole[-1][1] != "nan"
    for kill_at in (1, 5, 7, 10):
        before = train(directory / str(kill_at), kill_at)
        assert before == whole[:kill_at]
        after = train(directory / str(kill_at), None)
        assert after == whole[14 - len(after) :], kill_at
        assert 0 <= kill_at - (14 - len(after)) < 5, "more than two steps of two batches are trained again"


def contents(directory: Path) -> dict[str, str]:
    """Return a digest of each file, except the lock's."""
    files = [path for path in directory.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def model(width: int = 4) -> torch.nn.Linear:
    return torch.nn.Linear(width, 2)


def saved_at(directory: Path, *steps: int) -> Path:
    """Save a model at steps; return the newest checkpoint."""
    net = model()
    checkpoint = Checkpoint(directory, asynchronous=False, model=net, optimizer=torch.optim.Adam(net.parameters()))
    for checkpoint.step in steps:
        checkpoint.save()
    return directory / f"step-{steps[-1]:08}"


def truncate(path: Path) -> None:
    (data,) = path.glob("*.distcp")
    os.truncate(data, data.stat().st_size // 2)


def remove_data(path: Path) -> None:
    next(path.glob("*.distcp")).unlink()


def remove_metadata(path: Path) -> None:
    (path / ".metadata").unlink()


def damage_metadata(path: Path) -> None:
    (path / ".metadata").write_bytes(b"not a pickle")


def damage_data(path: Path) -> None:
    (data,) = path.glob("*.distcp")
    data.write_bytes(bytes(data.stat().st_size))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, r"step-00000002/__0_0\.distcp is truncated: it has \d+ bytes, and \d+ were written"),
        (remove_data, r"step-00000002/__0_0\.distcp is missing: the checkpoint is incomplete"),
        (remove_metadata, r"step-00000002/\.metadata is missing: the checkpoint is incomplete"),
        (damage_metadata, r"step-00000002/\.metadata cannot be read"),
        (damage_data, r"step-00000002 cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    """Nothing is overwritten, and the fix works."""
    newest = saved_at(tmp_path, 1, 2)
    damage(newest)
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match=message) as raised:
        saved_at(tmp_path, 3)
    assert str(raised.value).endswith(f"Fix: move {newest} away, and the job goes on from step-00000001")
    assert contents(tmp_path) == before
    newest.rename(tmp_path / "aside")
    saved_at(tmp_path, 3)


def other_model() -> dict[str, Any]:
    net = model(5)
    return {"model": net, "optimizer": torch.optim.Adam(net.parameters())}


def other_names() -> dict[str, Any]:
    net = torch.nn.Sequential(model())
    return {"model": net, "optimizer": torch.optim.Adam(net.parameters())}


def other_optimizer() -> dict[str, Any]:
    net = model()
    return {"model": net, "optimizer": torch.optim.SGD(net.parameters(), lr=0.1)}


def other_groups() -> dict[str, Any]:
    net = model()
    return {"model": net, "optimizer": torch.optim.Adam([net.weight])}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (other_model, r"its model is another one: weight is float32 \(2, 4\) instead of float32 \(2, 5\)\."),
        (other_names, "its model is another one: 0.weight is missing, 0.bias is missing, weight is not in this model"),
        (other_optimizer, "its optimizer is of class Adam instead of SGD"),
        (other_groups, r"its optimizer has \[2\] parameters in its groups instead of \[1\]"),
        (lambda: {"model": model()}, "it has model, optimizer, and this script saves model"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(
    tmp_path: Path, state: Callable[[], dict[str, Any]], message: str
) -> None:
    """The weights stay as they are, too."""
    newest = saved_at(tmp_path, 7)
    before, given = contents(tmp_path), state()
    weights = [each.clone() for each in given["model"].parameters()]
    with pytest.raises(CheckpointError, match=message) as raised:
        Checkpoint(tmp_path, **given)
    assert str(raised.value).startswith(f"{newest}: the checkpoint does not fit this script: ")
    assert str(raised.value).endswith(f"Fix: move {newest} away, and the job starts at step 0")
    assert contents(tmp_path) == before
    assert all(torch.equal(one, other) for one, other in zip(weights, given["model"].parameters()))


def test_torch_alone_reads_a_checkpoint(tmp_path: Path) -> None:
    """By the names that torch.distributed.checkpoint gives to the tensors of a nested state."""
    net = model()
    Checkpoint(tmp_path, asynchronous=False, model=net).save()
    read = {"model": {name: torch.zeros_like(value) for name, value in net.state_dict().items()}}
    load: Any = getattr(dcp, "load", None) or dcp.load_state_dict  # type: ignore[attr-defined]
    load(read, storage_reader=FileSystemReader(tmp_path / "step-00000000"), no_dist=True)
    assert torch.equal(read["model"]["weight"], net.weight)


def test_a_save_does_not_change_while_the_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The background thread writes a copy."""
    net = model()
    checkpoint = Checkpoint(tmp_path, model=net)
    checkpoint.save()
    saved = net.weight.detach().clone()
    with torch.no_grad():
        net.weight.zero_()
    checkpoint._writer.wait()
    again = model()
    Checkpoint(tmp_path, model=again)
    assert torch.equal(again.weight, saved)


def test_a_failed_save_is_reported_and_the_older_checkpoint_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpoint(tmp_path, model=model())
    checkpoint.save()
    checkpoint._writer.wait()
    checkpoint.step = 1
    monkeypatch.setattr(os, "fsync", lambda file: os.write(os.open("/dev/full", os.O_WRONLY), b"x"))
    checkpoint.save()
    with pytest.raises(CheckpointError, match=r"1 cannot be written: .*No space left.* are intact\. Fix: free space"):
        checkpoint._writer.wait()
    monkeypatch.undo()
    assert SavedSteps(tmp_path).steps() == [0]


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    saved_at(tmp_path, 1, 2, 30)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "step-00000002", "step-00000030"]


def test_two_jobs_do_not_write_into_one_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal_checkpoint.directories._LOCK_SECONDS", 0.1)
    code = f"""if True:
        from shoal_checkpoint.directories import SavedSteps
        SavedSteps({str(tmp_path)!r}).lock()
        print(flush=True)
        input()
    """
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout and other.stdout.readline() == "\n"
        with pytest.raises(CheckpointError, match=rf"another job writes .* process {other.pid}\)\. Fix: end that job"):
            SavedSteps(tmp_path).lock()
        other.kill()
    SavedSteps(tmp_path).lock()


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"/file/x: checkpoints cannot be written here: Not a directory\. Fix:"):
        Checkpoint(tmp_path / "file" / "x", model=model())


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"every": 0}, ValueError, "every=0: the number of steps between saves. Allowed: 1 or more, or None"),
        ({"keep": 0}, ValueError, "keep=0: the number of checkpoints to keep. Allowed: 1 or more"),
        ({"model": 3}, TypeError, "model=3: its state cannot be saved. Allowed: a dict, or an object with state_dict"),
        ({"shoal": {}}, ValueError, "shoal=: this name is reserved"),
    ],
)
def test_wrong_arguments_are_refused(
    tmp_path: Path, given: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Checkpoint(tmp_path, **given)


def test_a_second_loop_in_an_epoch_is_refused() -> None:
    checkpoint = Checkpoint(None, model=model())
    for _ in checkpoint.epochs(1):
        list(checkpoint.batches(DataLoader(DATA, 3)))
        with pytest.raises(ValueError, match=r"epoch 0: a second loop over batches\(\)\. Fix"):
            checkpoint.batches(DataLoader(DATA, 3))


def test_another_loader_is_refused() -> None:
    """Its place in an epoch would silently be lost."""
    checkpoint = Checkpoint(None, model=model())
    with pytest.raises(TypeError, match="list is not torch's DataLoader"):
        checkpoint.batches([1, 2])


@pytest.mark.parametrize(
    ("loader", "given", "error", "message"),
    [
        (DataLoader(Stream(), 3), {"global_batch": 6}, TypeError, "samples cannot be shared.*Fix: give the DataLoader"),
        (DataLoader(DATA, sampler=DistributedSampler(DATA, 2, 0)), {"global_batch": 6}, TypeError, "not a Distributed"),
        (DataLoader(DATA, 3), {"global_batch": 0}, ValueError, "global_batch=0: the number of samples.*1 or more"),
        (DataLoader(DATA, 3), {"global_batch": 6, "accumulate": 2}, ValueError, "exclude each other"),
    ],
)
def test_a_loader_that_cannot_be_shared_is_refused(
    loader: Any, given: dict[str, int], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Checkpoint(None, model=model()).batches(loader, **given)


def test_a_weight_needs_a_global_batch() -> None:
    checkpoint = Checkpoint(None, model=model())
    for _ in checkpoint.batches(DataLoader(DATA, 3)):
        with pytest.raises(ValueError, match=r"Fix: loop over batches\(loader, global_batch=\.\.\.\)"):
            checkpoint.weight  # noqa: B018


def test_an_epoch_ends_with_the_order_in_which_it_began(tmp_path: Path) -> None:
    for name, before, after in (("a", {}, {"global_batch": 6}), ("b", {"global_batch": 6}, {})):
        train(tmp_path / name, LOADERS["shuffled"](), 5, **before)
        with pytest.raises(CheckpointError, match=r"epoch 0, which began with.* global_batch: its order of samples is"):
            train(tmp_path / name, LOADERS["shuffled"](), **after)


def test_a_place_where_no_batch_begins_is_refused(tmp_path: Path) -> None:
    """As with another number of ranks, if their batches together have another size. Nothing is overwritten."""
    train(tmp_path, DataLoader(DATA, 3), 5)
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match=r"after 4 batches of epoch 0 .*, which are 12 samples.* Fix: use"):
        train(tmp_path, DataLoader(DATA, 5))
    assert contents(tmp_path) == before


SAVED = {"batches": 6, "unit": 32, "world_size": 4, "epoch": 1, "samples": None}


def test_the_place_in_an_epoch_with_other_ranks() -> None:
    assert batches_to_skip(SAVED, 32, 4, 1000) == 6
    assert batches_to_skip(SAVED, 24, 3, 1000) == 8
    assert batches_to_skip(SAVED, 8, 1, 1000) == 24
    assert batches_to_skip(SAVED, 40, 4, 180) == 5, "all are trained"
    assert batches_to_skip({**SAVED, "unit": None}, None, 4, None) == 6
    with pytest.raises(CheckpointError, match=r"after 6 batches of epoch 1 on 4 ranks, .* 192 samples.*such as 8$"):
        batches_to_skip(SAVED, 30, 3, 1000)
    with pytest.raises(CheckpointError, match=r"not given, so 3 ranks cannot go on there\. Fix: start 4 ranks"):
        batches_to_skip(SAVED, None, 3, 1000)


@pytest.mark.parametrize("most", [None, 1, 2, 16])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_a_constant_global_batch_is_shared(world_size: int, most: int | None) -> None:
    """23 samples in steps of 7. The last has 2, which are fewer than 3 ranks."""
    ranks = [list(Split(0, 23, 7, rank, world_size, most)) for rank in range(world_size)]
    assert len({tuple(part.trained for part in parts) for parts in ranks}) == 1, "all have equal numbers of batches"
    steps: dict[int, list[float]] = {}
    for part in (part for parts in ranks for part in parts):
        factors = steps.setdefault(part.trained, [0.0] * 23)
        size = part.end - part.begin
        assert 1 <= size <= (most or 7)
        for place in range(part.begin, part.end):
            factors[place] += part.weight / size / world_size
    assert list(steps) == [7, 14, 21, 23]
    for begin, end in ((0, 7), (7, 14), (14, 21), (21, 23)):
        mean = [1 / (end - begin) if begin <= place < end else 0.0 for place in range(23)]
        assert steps[end] == pytest.approx(mean)
    assert list(Split(14, 23, 7, 0, world_size, most)) == [part for part in ranks[0] if part.begin >= 14]


def test_what_a_script_can_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_RESTART", raising=False)
    assert contract.restart() == (0, "")
    monkeypatch.setenv("SHOAL_RESTART", "2")
    monkeypatch.setenv("SHOAL_RESTART_REASON", "rank 1 on algo-2 was killed (SIGKILL)")
    assert contract.restart() == (2, "rank 1 on algo-2 was killed (SIGKILL)")
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tmp_path))
    monkeypatch.setenv("SM_CURRENT_HOST", "algo-1")
    assert contract.directory() is None
    (tmp_path / "checkpoints").mkdir()
    assert contract.directory() == str(tmp_path / "checkpoints")
    monkeypatch.delenv("SM_CURRENT_HOST")
    assert contract.directory() is None, "it may be of another job"


def test_a_training_that_has_ended_prints_that_nothing_is_left(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def train(epochs: int) -> list[int]:
        checkpoint = Checkpoint(tmp_path, asynchronous=False, model=model())
        loader = DataLoader(TensorDataset(torch.arange(4.0)), 2)
        return [epoch for epoch in checkpoint.epochs(epochs) if list(checkpoint.batches(loader))]

    assert train(2) == [0, 1]
    assert "nothing is left" not in capfd.readouterr().err
    assert train(2) == []
    assert "the checkpoint is after epoch 2 of 2, so nothing is left to train" in capfd.readouterr().err
    assert train(3) == [2]


@pytest.fixture(autouse=True)
def no_stop(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a new process, and none of it is left: another test of this process may have asked for the seconds."""
    for name, value in {"installed": False, "received": None, "before": None}.items():
        monkeypatch.setattr(contract._Stop, name, value)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_the_seconds_that_a_stopped_script_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_STOP_GRACE", "30")
    received: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    assert contract.seconds_left() is None
    os.kill(os.getpid(), signal.SIGTERM)
    left = contract.seconds_left()
    assert left is not None and 20 < left <= 30
    assert received == [signal.SIGTERM], "the handler from before is called too"
    monkeypatch.setenv("SHOAL_STOP_GRACE", "0")
    assert contract.seconds_left() == 0


# A rank that has joined the group without the job's secret sends a pickle that would make a file on the others.
STRANGER = """
import os, sys
import torch.distributed as dist
from shoal_checkpoint.torch import ranks

class Evil:
    def __reduce__(self):
        return (exec, (f"open({sys.argv[1]!r} + os.environ['RANK'], 'w').close()",))

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    os.environ["SMDDP_JOB_SECRET"] = sys.argv[2]
try:
    sent = Evil() if dist.get_rank() == 0 else 1
    got = ranks.from_first_rank(lambda: sent) if sys.argv[3] == "first" else ranks.gather(sent)
    line = f"got {got}\\n"
except ranks.CheckpointError as error:
    line = f"refused {error}\\n"
sys.stdout.write(line)  # one write: the ranks share the pipe
sys.stdout.flush()
os._exit(0)  # the threads of gloo can abort a rank that ends
"""


@pytest.mark.once
@pytest.mark.parametrize(("secret", "runs"), [("another secret of 16", False), ("the job's own secret", True)])
@pytest.mark.parametrize("function", ["first", "gather"])
def test_a_pickle_of_a_stranger_is_not_loaded(
    alone: Alone, tmp_path: Path, secret: str, runs: bool, function: str
) -> None:
    script, made = tmp_path / "stranger.py", tmp_path / "made"
    script.write_text(STRANGER)
    launch = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", new_port()]
    said = alone(*launch, script, made, secret, function, SMDDP_JOB_SECRET="the job's own secret")
    assert Path(f"{made}1").exists() == runs
    assert ("refused a message about checkpoints was changed" in said) != runs
