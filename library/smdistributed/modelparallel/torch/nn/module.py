"""`smp.nn.DistributedModule`, and the parameters that are split over the ranks of TP_GROUP."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from smdistributed.modelparallel.backend.exceptions import SMPUnsupportedError
from smdistributed.modelparallel.torch.nn.tensor_group import own_part, tensor_group

_MARK = "_smp_split"


@dataclass(frozen=True)
class Split:
    """How a parameter is split over TP_GROUP: each rank has the same share along `axis`, of `size` elements in all."""

    axis: int
    size: int


class DistributedModule(nn.Module):
    """The base of all tensor-parallel modules (AWS API 1.6): some of its parameters are split over TP_GROUP."""

    def split_parameter(self, name: str, axis: int) -> None:
        """Keeps this rank's share of a parameter of this module. The Parameter object stays.

        Args:
            name: The parameter's name in this module.
            axis: The axis along which it is split.

        Raises:
            SMPUnsupportedError: If `tensor_parallel_degree` does not divide that axis.
        """
        parameter = self._parameters[name]
        assert parameter is not None
        if hasattr(parameter, _MARK) or tensor_group().size == 1:  # or shared with a module that has split it
            return
        require_divisible(f"{type(self).__name__}.{name}", parameter.shape[axis])
        setattr(parameter, _MARK, Split(axis, parameter.shape[axis]))
        parameter.data = own_part(parameter.data, axis)


def require_divisible(what: str, size: int) -> None:
    """Raises SMPUnsupportedError if TP_GROUP cannot have equal shares of `size` elements."""
    degree = tensor_group().size
    if size % degree:
        raise SMPUnsupportedError(
            f"{what} has size {size}, which 'tensor_parallel_degree' {degree} does not divide. Fix: choose a degree "
            "that divides it, or leave this module out of tensor parallelism."
        )


def split_of(tensor: torch.Tensor) -> Split | None:
    """How a parameter is split; None if every rank has all of it."""
    return getattr(tensor, _MARK, None)


def copy_split(source: torch.Tensor, target: torch.Tensor) -> None:
    """Marks a parameter as split as another one is."""
    split = split_of(source)
    if split is not None:
        setattr(target, _MARK, split)


def take_share(tensor: torch.Tensor, split: Split) -> torch.Tensor:
    """Returns this rank's share of a whole tensor; a share as it is."""
    is_whole = tensor.dim() > split.axis and tensor.shape[split.axis] == split.size
    return own_part(tensor, split.axis) if is_whole else tensor
