"""Splitting and merging of torch tensors (see `backend.splitting`), and StepOutput."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from smdistributed.modelparallel.backend import splitting
from smdistributed.modelparallel.backend.splitting import like


class StepOutput:
    """The tensors that a function under `smp.step` returned, one for each microbatch (AWS API).

    Attributes:
        outputs: The tensors, in the order of the microbatches.
    """

    def __init__(self, outputs: Sequence[torch.Tensor]) -> None:
        self.outputs = list(outputs)

    def reduce_sum(self) -> torch.Tensor:
        """The sum of the microbatches' tensors, which must have the same shape."""
        return torch.stack(self.outputs).sum(0)

    def reduce_mean(self) -> torch.Tensor:
        """The mean of the microbatches' tensors, which must have the same shape and no integer dtype."""
        return torch.stack(self.outputs).mean(0)

    def concat(self) -> torch.Tensor:
        """The microbatches' tensors concatenated along axis 0; scalars become a vector."""
        return torch.cat([output.reshape(1) if output.dim() == 0 else output for output in self.outputs])

    def stack(self) -> torch.Tensor:
        """The microbatches' tensors along a new axis 0."""
        return torch.stack(self.outputs)

    def detach(self) -> StepOutput:
        """The same values without a graph. transformers' Trainer calls it."""
        return StepOutput([output.detach() for output in self.outputs])

    def __repr__(self) -> str:
        return f"StepOutput({self.outputs!r})"


class TorchSplitter(splitting.ArgumentSplitter):
    def is_tensor(self, value: Any) -> bool:
        return _is_tensor(value)

    def shape(self, tensor: torch.Tensor) -> tuple[int, ...]:
        return tuple(tensor.shape)

    def cut(self, tensor: torch.Tensor, count: int, axis: int) -> list[torch.Tensor]:
        return list(torch.tensor_split(tensor, count, axis))


def merge(results: Sequence[Any]) -> Any:
    """Merges the results of microbatches: StepOutput in place of tensors, lists in place of other values."""
    return splitting.merge(results, _is_tensor, StepOutput)


def detach(result: Any) -> Any:
    """Returns nested containers with all tensors detached from their graph; the given ones are not changed."""
    if isinstance(result, torch.Tensor):
        return result.detach()
    if isinstance(result, Mapping):
        return like(result, {key: detach(item) for key, item in result.items()})
    if isinstance(result, (tuple, list)):
        return like(result, [detach(item) for item in result])
    return result


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)
