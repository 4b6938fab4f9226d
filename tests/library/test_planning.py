"""`python -m smdistributed.modelparallel plan`: what it predicts, recommends and refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

MODELS = """\
import torch
from torch import nn

def wide():  # 16 GiB with Adam, and too large for the test to construct
    return nn.Sequential(*(nn.Linear(8192, 8192, bias=False) for _ in range(16))), (torch.empty(16, 8192),)

def small():
    return nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)), (), {"input": torch.empty(4096, 256)}

def alone():
    return nn.Linear(4, 4)

def asks():
    class Asks(nn.Module):
        def forward(self, value):
            return value.numpy()
    return Asks(), (torch.ones(3),)

def breaks():
    raise OSError("no such configuration")
"""
LAYER = 8192 * 8192 * 4 * 4  # the weight, its gradient and two moments of Adam, in bytes
GIB = 1 << 30


def plan(directory: Path, name: str, *options: str) -> subprocess.CompletedProcess[str]:
    (directory / "models.py").write_text(MODELS)
    command = [sys.executable, "-m", "smdistributed.modelparallel", "plan", f"models.py:{name}", *options]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=120)


def recommended(ended: subprocess.CompletedProcess[str]) -> dict[str, object]:
    assert ended.returncode == 0, ended.stderr
    found: dict[str, object] = json.loads(ended.stdout.rpartition("recommended: ")[2])
    return found


def test_the_fewest_devices_on_which_a_model_fits(tmp_path: Path) -> None:
    ended = plan(tmp_path, "wide", "--memory", "9")
    assert recommended(ended) == {"partitions": 2, "microbatches": 16, "active_microbatches": 4}
    assert ended.stdout.count("does not fit") == 4, "one device, whatever the microbatches"
    (sizes,) = [line.split()[4:] for line in ended.stdout.splitlines() if line.split()[:3] == ["2", "16", "4"]]
    assert [float(size) for size in sizes] == pytest.approx([8 * LAYER / GIB] * 2, abs=0.02)
    assert "stage 1:  50.0%  8, 9, 10, 11, 12, 13, 14, 15" in ended.stdout


def test_what_is_decided_already_stays(tmp_path: Path) -> None:
    given = {"partitions": 4, "microbatches": 4, "pipeline": "simple"}
    assert given.items() <= recommended(plan(tmp_path, "wide", "--mp-parameters", json.dumps(given))).items()


def test_what_backward_needs_counts_once(tmp_path: Path) -> None:
    """The result of the ReLU, which both neighbours keep; not the batch, not the results that nobody needs."""
    ended = plan(tmp_path, "small", "--mp-parameters", '{"partitions": 1, "microbatches": 1}', "--optimizer", "sgd")
    (line,) = [line for line in ended.stdout.splitlines() if line.split()[:2] == ["1", "1"]]
    parameters = 2 * (2 * 256 * 1024 + 256 + 1024) * 4
    assert float(line.split()[4]) == pytest.approx((4096 * 1024 * 4 + parameters) / GIB, abs=0.006)


def test_nothing_fits(tmp_path: Path) -> None:
    ended = plan(tmp_path, "wide", "--memory", "1", "--devices", "4")
    assert ended.returncode == 1
    assert "Nothing fits 1 GiB on up to 4 devices: 4.0" in ended.stdout


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("small", ["--mp-parameters", '{"partitions": 5}'], "has 3 modules that can be on stages of their own"),
        ("small", ["--mp-parameters", "[]"], "expected a JSON object"),
        ("small", ["--devices", "0"], "expected 1 or more, found 0"),
        ("smal", [], "models.py has no function 'smal'"),
        ("alone", [], "must return (module, args)"),
        ("asks", [], "cannot run on the meta device"),
        ("breaks", [], "raised OSError on the meta device: no such configuration"),
    ],
)
def test_what_cannot_be_planned_is_said(tmp_path: Path, name: str, options: list[str], words: str) -> None:
    ended = plan(tmp_path, name, *options)
    assert ended.returncode == 2
    assert words in ended.stderr
