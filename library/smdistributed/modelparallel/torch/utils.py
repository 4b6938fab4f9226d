"""Functions that published scripts import from here."""

from __future__ import annotations

import torch

from smdistributed.modelparallel.torch.state_mod import state

__all__ = ["get_distribution_axis", "rmsg"]


def rmsg(msg: object) -> str:
    """`msg` as text, with the rank that says it in front. AWS publishes the name alone."""
    return f"[rank {state.rank}] {msg}" if state.initialized else str(msg)


def get_distribution_axis(param: torch.Tensor) -> int | None:
    """The axis along which tensor-parallel ranks have a part of a parameter each: None, for none has (AWS API 1.6)."""
    return None
