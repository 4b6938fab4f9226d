"""A rehearsed rank that offloads activations: the most bytes of them on its emulated GPU, with and without.

python modelparallel_offloaded.py [LAYERS]. It compares the parameters of three steps, too. A rehearsal loads tensors
without a copy, so that the bytes of inputs that are loaded ahead are added.
"""

from __future__ import annotations

import copy
import os
import sys
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.backend.config import check

WIDTH, ROWS = 16, 4096


class Block(nn.Module):
    """An MLP. Two tensors in, in a tuple, as layers of published models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, both: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, mask = both
        return hidden + self.drop(self.down(nn.functional.gelu(self.up(hidden)))) * mask, mask


class PeakOfActivations(TorchDispatchMode):
    """The most bytes that results of torch's kernels have had at once, without copies on the host.

    Those begin empty, and are cloned when the rehearsal pins them: no other tensor here is.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive: dict[int, tuple[Any, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        self._alive = {key: found for key, found in self._alive.items() if not found[0].expired()}
        for result in results if isinstance(results, tuple) else [results]:
            if isinstance(result, torch.Tensor):
                storage = result.untyped_storage()
                is_on_host = str(func).startswith(("aten.empty", "aten.clone"))
                size = 0 if is_on_host else storage.nbytes()
                self._alive.setdefault(storage._cdata, (StorageWeakRef(storage), size))  # type: ignore[no-untyped-call]
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return results


PEAKS: list[PeakOfActivations] = []


@smp.step
def train_step(model: Any, data: torch.Tensor) -> None:
    PEAKS.append(PeakOfActivations())
    with PEAKS[-1]:  # modes are of one thread
        output, _ = model((data, torch.ones_like(data)))
        model.backward(output.square().mean())


def train(fresh: nn.Module, checkpoints: bool, **values: Any) -> tuple[int, list[torch.Tensor]]:
    """Returns the peak of a step, and the parameters after three."""
    smp.state.cfg = check({"partitions": smp.pp_size(), "microbatches": smp.pp_size(), **values})
    smp.state.model = smp.state.optimizer = None
    smp.state.stage.resume(0)
    module = copy.deepcopy(fresh)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(module.parameters(), 0.1))
    model = smp.DistributedModel(module)
    if checkpoints:
        smp.set_activation_checkpointing(module)
    PEAKS.clear()
    for _ in range(3):
        optimizer.zero_grad()
        train_step(model, torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(7)).cuda())
        optimizer.step()
    return max((one.peak for one in PEAKS), default=0), [
        parameter.detach().clone() for parameter in model.local_parameters()
    ]


def main(layers: str = "12") -> None:
    smp.init({"partitions": int(os.environ.get("STAGES", "1")), "offload_activations": True})
    torch.manual_seed(0)
    fresh = nn.Sequential(*(Block() for _ in range(int(layers))))
    whole, _ = train(fresh, checkpoints=False)
    kept, expected = train(fresh, checkpoints=True)
    for horizon in (1, 4):
        peak, found = train(fresh, checkpoints=True, offload_activations=True, activation_loading_horizon=horizon)
        assert all(map(torch.equal, found, expected))
        assert smp.pp_size() > 1 or peak < 0.7 * kept, (peak, kept)
        peak += horizon * 2 * ROWS * WIDTH * 4
        print(f"horizon {horizon}: {peak} of {kept} with checkpoints, {whole} without\n", end="")


if __name__ == "__main__":
    main(*sys.argv[1:])
