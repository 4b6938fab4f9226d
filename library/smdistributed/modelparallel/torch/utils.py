"""Functions that published scripts import from here."""

from __future__ import annotations

import torch

from smdistributed.modelparallel.torch.nn.module import split_of
from smdistributed.modelparallel.torch.script.state import state

__all__ = ["get_distribution_axis", "rmsg"]


def rmsg(msg: object) -> str:
    """Returns `msg` as "[rank 0] msg", with this rank; before `smp.init` as it is. AWS publishes the name alone."""
    return f"[rank {state.rank}] {msg}" if state.initialized else str(msg)


def get_distribution_axis(param: torch.Tensor) -> int | None:
    """The axis along which tensor parallelism splits a parameter; None if each rank has all of it (AWS API 1.6)."""
    split = split_of(param)
    return None if split is None else split.axis
