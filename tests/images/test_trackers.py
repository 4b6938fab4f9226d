"""The runs that experiment trackers leave in the output of a job: their commands, and TensorBoard's scalars.

The event files in data/events are from torch's SummaryWriter and from Keras.
"""

from __future__ import annotations

import math
import os
import random
import struct
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from shoal.jobs import trackers
from shoal.jobs.job import FinishedJob, JobRequest
from shoal.jobs.job_log import Key, Series
from shoal.jobs.store import JobRecord, OpenJob
from shoal.jobs.summary import summary_rows
from shoal.jobs.trackers import find_trackers, read_scalars
from shoal.report import job_collection
from shoal.report.job_page import render_job_page
from shoal.report.job_report import read_report

EVENTS = Path(__file__).parent / "data" / "events"
TORCH = next((EVENTS / "torch").iterdir())
NAMES = {
    "TensorBoard": ("tensorboard/train/events.out.tfevents.1.h.1.0", "tensorboard --logdir {}/tensorboard/train"),
    "W&B": ("data/wandb/offline-run-20261127_1-ab/run-ab.wandb", "wandb sync {}/data/wandb/offline-run-*"),
    "Trackio": ("data/trackio/digits.db", "TRACKIO_DIR={}/data/trackio trackio show"),
    "MLflow": ("data/mlflow.db", "mlflow ui --backend-store-uri sqlite:///{}/data/mlflow.db"),
    "MLflow files": ("data/mlruns/1/ab/meta.yaml", "mlflow ui --backend-store-uri {}/data/mlruns"),
}


def flatten(series: dict[Key, Series]) -> dict[tuple[str, str], dict[float, float]]:
    return {
        (name, run): dict(zip(each.xs, (round(value, 4) for value in each.values)))
        for (name, run, _), each in series.items()
    }


def write_record(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + bytes(4) + content + bytes(4)


def test_scalars_of_torch_and_keras() -> None:
    found = read_scalars(EVENTS, 1795780000.0)
    assert flatten(found) == {
        ("loss/train", "torch"): {0: 1.0, 10: 0.5, 20: 0.3333, 40: 0.2},
        ("acc", "torch"): {0: 0.0, 1: 0.2, 2: 0.4, 3: 0.6, 4: 0.8},
        ("evaluation_loss_vs_iterations", "keras"): {7: 2.4468, 14: 2.4255},
        ("evaluation_accuracy_vs_iterations", "keras"): {7: 0.0769, 14: 0.0962},
        ("evaluation_top5_vs_iterations", "keras"): {7: 0.3846, 14: 0.3654},
        ("epoch_loss", "keras"): {0: 2.4468, 1: 2.4255},
        ("epoch_accuracy", "keras"): {0: 0.0769, 1: 0.0962},
        ("epoch_top5", "keras"): {0: 0.3846, 1: 0.3654},
    }
    loss = found["loss/train", "torch", None]
    assert [(mark.x, mark.text) for mark in loss.marks] == [(30, "nan")]
    assert 100 < loss.times[0] < 130


def test_a_file_that_ends_early_keeps_its_beginning(tmp_path: Path) -> None:
    content = TORCH.read_bytes()
    counts = []
    for length in range(0, len(content) + 1, 37):
        (tmp_path / TORCH.name).write_bytes(content[:length])
        counts.append(sum(len(series.values) for series in read_scalars(tmp_path, 0.0).values()))
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 9)


@pytest.mark.parametrize(
    "content",
    [
        random.Random(0).randbytes(10_000),
        struct.pack("<Q", 2**63) + bytes(100),
        struct.pack("<Q", 100) + bytes(50),
        write_record(b"\xff" * 100),
        write_record(b"\x2a\xff\xff\xff\xff\x0f" + bytes(50)),  # a summary of 4 GB
        write_record(b"\x0b" * 50),  # groups
        write_record(b"\x2a\x08\x0a\x06\x0a\x01\xff\x15\x00\x00"),  # a value that is cut
        write_record(b"\x28\x01\x10\x02"),  # a number as a summary
        write_record(b"\x0a\x03abc\x2a\x00"),  # a time of three bytes
        write_record(b"\x09" + struct.pack("<d", math.inf) + b"\x2a\x0a\x0a\x08\x0a\x01a\x15" + struct.pack("<f", 1)),
        write_record(b"\x2a\x09\x0a\x07\x0a\x01a\x12\x02ab"),  # a value of two bytes
        write_record(b"\x10\x01") * 10_000,
        bytes(100_000),
    ],
)
def test_hostile_event_files_have_no_scalars(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "events.out.tfevents.1").write_bytes(content)
    began = time.monotonic()
    assert read_scalars(tmp_path, 0.0) == {}
    assert time.monotonic() - began < 5


def test_links_pipes_and_large_files_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "output"
    output.mkdir()
    (output / "a.tfevents.link").symlink_to(TORCH)
    os.mkfifo(output / "b.tfevents.pipe")
    with (output / "c.tfevents.sparse").open("wb") as file:
        file.truncate(1 << 40)
    (output / "d.tfevents").write_bytes(TORCH.read_bytes())
    assert read_scalars(output, 0.0) == {}  # the sparse file takes all bytes that may be read
    (output / "c.tfevents.sparse").unlink()
    assert len(read_scalars(output, 0.0)) == 2
    with monkeypatch.context() as patch:
        patch.setattr(trackers, "_MOST_RECORD", 20)
        assert read_scalars(output, 0.0) == {}
    with monkeypatch.context() as patch:
        patch.setattr(trackers, "_MOST_SCALARS", 3)
        assert sum(len(series.values) for series in read_scalars(output, 0.0).values()) == 3
    linked = tmp_path / "linked"
    linked.symlink_to(EVENTS)
    assert read_scalars(linked, 0.0) == {}


def test_names_of_event_files_are_clean(tmp_path: Path) -> None:
    value = b"\x0a\x05\x1b[2Jx\x15" + struct.pack("<f", 1.5)
    summary = b"\x0a" + bytes([len(value)]) + value
    (tmp_path / "tfevents").write_bytes(write_record(b"\x2a" + bytes([len(summary)]) + summary))
    ((name, _, _),) = read_scalars(tmp_path, 0.0)
    assert name == "\ufffd[2Jx"


@pytest.mark.parametrize("tracker", NAMES)
def test_trackers_are_found_by_their_files(tmp_path: Path, tracker: str) -> None:
    name, command = NAMES[tracker]
    first, second = tmp_path / "algo-1", tmp_path / "algo 2"
    first.mkdir()
    (second / name).parent.mkdir(parents=True)
    (second / name).touch()
    found = find_trackers([first, second])
    (shown,) = found.values()
    assert [*found] == [tracker.removesuffix(" files")]
    assert "'" in shown  # the path has a space
    assert shown.replace("'", "") == command.format(second)


def test_other_files_are_no_runs(tmp_path: Path) -> None:
    for name in ("data/cache.db", "data/meta.yaml", "data/wandb/debug.log", "data/run.wandb"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert find_trackers([tmp_path, tmp_path / "missing"]) == {}


def open_job(directory: Path, **options: Any) -> OpenJob:
    request = JobRequest(source=directory, entry_point="train.py", **options)
    return OpenJob("digits-1", directory, JobRecord(replace(request, image="image:1")), cast(Any, None), False)


@pytest.mark.parametrize(("hosts", "runs"), [(1, {"."}), (2, {"algo-1 .", "algo-2 ."})])
def test_the_report_has_the_scalars_of_all_hosts(tmp_path: Path, hosts: int, runs: set[str]) -> None:
    for number in range(hosts):
        place = tmp_path / f"algo-{number + 1}" / "output" / "tensorboard"
        place.mkdir(parents=True)
        (place / TORCH.name).write_bytes(TORCH.read_bytes())
    opened = open_job(tmp_path, hosts=hosts)
    trackers = find_trackers(opened.outputs.values())
    result = FinishedJob("digits-1", 0, tmp_path, {}, {}, {}, {}, trackers=trackers)
    command = f"tensorboard --logdir {tmp_path}/algo-1/output/tensorboard"
    assert ("TensorBoard", command) in summary_rows(opened.record.request, result)
    (tmp_path / "report.html").write_text(render_job_page(job_collection.collect_report(opened, result)))
    report = read_report(tmp_path)
    assert {curve.host for curve in report.scalars} == runs
    assert {(curve.name, curve.x_name, len(curve.values)) for curve in report.scalars} == {
        ("acc", "step", 5),
        ("loss/train", "step", 4),
    }
    assert ("TensorBoard", command) in [*report.summary]
