"""Partial checkpoints of AWS's library, laid out as its documentation and its example scripts say."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.backend.config import check
from smdistributed.modelparallel.backend.exceptions import SMPRuntimeError

SHARDS = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(4, 5), nn.Linear(5, 2), nn.BatchNorm1d(2)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(self.first(value)))  # type: ignore[no-any-return]


@pytest.fixture
def job(model_parallel_rank: None) -> Iterator[tuple[Any, Any]]:
    """A wrapped model of one rank, and its optimizer."""
    smp.state.cfg = check({"partitions": 1})
    smp.state.model = smp.state.optimizer = None
    model = smp.DistributedModel(Net())
    yield model, smp.DistributedOptimizer(torch.optim.Adam(model.parameters()))
    smp.state.model = smp.state.optimizer = None


@pytest.fixture
def other() -> dict[str, torch.Tensor]:
    """The state dict of a model with other values."""
    torch.manual_seed(9)
    return {key: value.clone() for key, value in Net().state_dict().items()}


def write_stages(directory: Path, values: dict[str, torch.Tensor]) -> None:
    """As a pipeline of two stages with half precision has left it."""
    directory.mkdir()
    for stage, names in enumerate((("first",), ("second", "norm"))):
        part = {key: value for key, value in values.items() if key.partition(".")[0] in names}
        torch.save(part, directory / f"model_{stage}.pt")
        torch.save({"state": {}}, directory / f"optimizer_{stage}.pt")
        torch.save({"masters": []}, directory / f"fp16_states_{stage}.pt")
    torch.save({"epoch": 3}, directory / "user_content.pt")


def write_shards(directory: Path, values: dict[str, torch.Tensor], count: int = SHARDS) -> None:
    """As sharded data parallelism has left it, by AWS's example of 2022."""
    directory.mkdir()
    buffers = [name for name, _ in Net().named_buffers()]
    shapes = OrderedDict((f"module.{name}", p.shape) for name, p in Net().named_parameters())
    flats: list[list[torch.Tensor]] = [[] for _ in range(count)]
    for name, shape in shapes.items():
        own = math.ceil(shape.numel() / count)
        flat = torch.cat([values[name.removeprefix("module.")].flatten(), torch.zeros(own * count - shape.numel())])
        for shard, part in enumerate(flat.chunk(count)):
            flats[shard].append(part)
    torch.save({"module": {name: values[name] for name in buffers}}, directory / "model_0.pt")
    for shard, parts in enumerate(flats):
        content = {"partition_count": count, "fp32_flat_groups": [torch.cat(parts)]}
        torch.save(content, directory / f"optimizer_{shard}.pt")
    torch.save({"buffer_names": buffers, "param_shapes": [shapes], "epoch": 3}, directory / "user_content.pt")


@pytest.mark.parametrize("write", [write_stages, write_shards])
def test_weights_of_published_layouts_are_read(
    job: tuple[Any, Any], tmp_path: Path, other: dict[str, torch.Tensor], write: Any
) -> None:
    write(tmp_path / "tag_partial", other)
    with pytest.raises(SMPRuntimeError, match=r"which has not published.*Fix: give load_optimizer=False"):
        smp.resume_from_checkpoint(tmp_path, "tag")
    assert smp.resume_from_checkpoint(tmp_path, "tag", load_optimizer=False)["epoch"] == 3
    found = job[0].state_dict()
    assert all(torch.equal(found[name], value) for name, value in other.items())


def test_weights_that_the_model_lacks_are_an_error_and_a_weight_that_two_files_have_may_be_nan(
    job: Any, tmp_path: Path, other: dict[str, torch.Tensor]
) -> None:
    other["norm.weight"][0] = float("nan")
    write_stages(tmp_path / "tag_partial", other)
    torch.save(
        {"norm.weight": other["norm.weight"], "third.weight": torch.ones(2)}, tmp_path / "tag_partial/model_2.pt"
    )
    with pytest.raises(RuntimeError, match=r"unexpected keys: third\.weight\. Fix: give strict=False"):
        smp.resume_from_checkpoint(tmp_path, "tag", load_optimizer=False)
    smp.resume_from_checkpoint(tmp_path, "tag", load_optimizer=False, strict=False)


def test_a_missing_shard_is_an_error(job: tuple[Any, Any], tmp_path: Path, other: dict[str, torch.Tensor]) -> None:
    write_shards(tmp_path / "tag_partial", other)
    (tmp_path / "tag_partial" / "optimizer_1.pt").unlink()
    with pytest.raises(SMPRuntimeError, match=r"has 2 of 3 files optimizer_\*\.pt.*Fix: copy"):
        smp.resume_from_checkpoint(tmp_path, "tag", load_optimizer=False)


def test_shards_without_shapes_are_refused(job: Any, tmp_path: Path, other: dict[str, torch.Tensor]) -> None:
    write_shards(tmp_path / "tag_partial", other)
    torch.save({"epoch": 3}, tmp_path / "tag_partial" / "user_content.pt")
    with pytest.raises(SMPRuntimeError, match=r"lacks param_shapes and buffer_names.*Fix: save it with partial=False"):
        smp.resume_from_checkpoint(tmp_path, "tag", load_optimizer=False)


def test_shares_of_tensor_parallelism_are_refused(job: Any, tmp_path: Path, other: dict[str, torch.Tensor]) -> None:
    directory = tmp_path / "tag_partial"
    directory.mkdir()
    for rank, share in enumerate(other["first.weight"].chunk(2, 1)):
        torch.save({**other, "first.weight": share}, directory / f"model_0_{rank}.pt")
    with pytest.raises(SMPRuntimeError, match=r"first\.weight with shape \(5, 2\).*tensor parallelism.*Fix: save it"):
        smp.resume_from_checkpoint(tmp_path, "tag", load_optimizer=False)


def test_files_of_another_layout_are_refused(job: Any, tmp_path: Path) -> None:
    directory = tmp_path / "tag_partial"
    directory.mkdir()
    torch.save({"weights": [torch.ones(2)]}, directory / "model_0.pt")
    with pytest.raises(SMPRuntimeError, match=r"another layout than AWS has published.*Fix: save it"):
        smp.resume_from_checkpoint(tmp_path, "tag", load_optimizer=False)
