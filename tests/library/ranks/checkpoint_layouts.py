"""A rank of a job in one layout: python checkpoint_layouts.py saves|resumes DIRECTORY NAME [OTHER ...].

Each layout trains BEFORE steps and saves. Then each resumes what the others have saved, and makes one more step. Model
and optimizer equal those of plain torch, before and after that step.
"""

from __future__ import annotations

import copy
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.torch.script.tensor_files import TensorFiles

COMMON: Any = runpy.run_path(str(Path(__file__).with_name("tensor_parallel.py")))
BEFORE, TOLERANCE = 3, 1e-6
MOMENTS = ("exp_avg", "exp_avg_sq")


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 1e-2, eps=1e-4)


class Scaled(nn.LayerNorm):
    """As nn.BatchNorm1d, it loads its state by a function of its own."""

    factor: torch.Tensor

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) * self.factor


def fresh(seed: int) -> Any:
    """Two modules, which may be on different stages, share a buffer. It differs by seed: a checkpoint restores it."""
    torch.manual_seed(seed)
    made = COMMON["Mlp"]()
    made.norm, factor = Scaled(24), torch.full((24,), 1.0 + seed)
    for module in (made.norm, made.head):
        module.register_buffer("factor", factor)
    return made


def plain_run(steps: int) -> tuple[Any, torch.optim.Optimizer]:
    module = fresh(0)
    optimizer = make_optimizer(module.parameters())
    for tokens, target in COMMON["batches"](steps):
        optimizer.zero_grad()
        torch.autograd.backward(functional.mse_loss(module(tokens), target))
        optimizer.step()
    return module, optimizer


def wrapped(seed: int) -> tuple[Any, Any]:
    smp.state.model = smp.state.optimizer = None
    module = fresh(seed)
    if smp.tp_size() > 1:
        smp.set_tensor_parallelism(module)
    model = smp.DistributedModel(module)
    return model, smp.DistributedOptimizer(make_optimizer(model.parameters()))


def train(model: Any, optimizer: Any, begin: int, end: int) -> None:
    for tokens, target in COMMON["batches"](end)[begin:]:
        optimizer.zero_grad()
        COMMON["train_step"](model, COMMON["own_rows"](tokens), COMMON["own_rows"](target))
        optimizer.step()


def compare(model: Any, optimizer: Any, steps: int) -> None:
    """Parameters, and the moments of the optimizer, are those of plain torch after so many steps."""
    module, inner = plain_run(steps)
    found, expected = model.state_dict(), module.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=TOLERANCE, atol=TOLERANCE, msg=f"{name} differs")
    saved, wanted = optimizer.state_dict()["state"], inner.state_dict()["state"]
    assert saved.keys() == wanted.keys()
    for number, entry in wanted.items():
        assert float(saved[number]["step"]) == steps
        for key in MOMENTS:
            torch.testing.assert_close(saved[number][key].cpu(), entry[key], rtol=TOLERANCE, atol=TOLERANCE)


def saves(directory: Path, name: str) -> None:
    model, optimizer = wrapped(0)
    train(model, optimizer, 0, BEFORE)
    compare(model, optimizer, BEFORE)
    smp.save_checkpoint(directory, name, True, model, optimizer, {"layout": name})


def resumes(directory: Path, _: str, *others: str) -> None:
    for other in others:
        model, optimizer = wrapped(1)
        assert smp.resume_from_checkpoint(directory, other) == {"layout": other}
        train(model, optimizer, BEFORE, BEFORE + 1)
        compare(model, optimizer, BEFORE + 1)
        counted = read_again(directory, other)
        assert counted == own_bytes(model, optimizer) + rest_bytes(directory / f"{other}_partial"), (other, counted)
        compare(model, optimizer, BEFORE)


def read_again(directory: Path, name: str) -> int:
    """Resumes a placed model. Returns the bytes of tensors that this rank reads."""
    counts: list[int] = []
    original = os.preadv

    def count(*arguments: Any) -> int:
        counts.append(original(*arguments))
        return counts[-1]

    os.preadv = count
    try:
        smp.resume_from_checkpoint(directory, name)
    finally:
        os.preadv = original
    return sum(counts)


def own_bytes(model: Any, optimizer: Any) -> int:
    """The bytes of this rank's parts of the model, and of its own part of the optimizer's state."""
    local = copy.copy(optimizer.local_parts()["state"])
    values = [value for entry in local.values() for value in entry.values()]
    buffers = {id(buffer): buffer for buffer in model.local_buffers()}.values()
    read = [*(p for p in model.local_parameters() if p.numel()), *buffers, *values]
    own = [value.to_local() if hasattr(value, "to_local") else value for value in read]
    return sum(value.numel() * value.element_size() for value in own)


def rest_bytes(directory: Path) -> int:
    files = (TensorFiles(directory.glob(f"{kind}_*")) for kind in ("model", "optimizer"))
    return sum(len(content) for found in files for _, content in found.read_bytes("#rest"))


def main(case: str, directory: str, name: str, *others: str) -> None:
    smp.init()
    cases: dict[str, Any] = {"saves": saves, "resumes": resumes}
    cases[case](Path(directory), name, *others)
    print(f"{case}\n", end="")


if __name__ == "__main__":
    main(*sys.argv[1:])
