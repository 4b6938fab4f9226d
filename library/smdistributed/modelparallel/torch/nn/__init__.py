"""Modules of AWS API 1.6: FusedLayerNorm, and the names of the tensor-parallel ones."""

from __future__ import annotations

from torch import nn

from smdistributed.modelparallel.torch.nn import huggingface
from smdistributed.modelparallel.torch.unsupported import MODULES, module


class FusedLayerNorm(nn.LayerNorm):
    """torch's, which is one kernel too; published scripts look for this class to choose what decays."""


globals().update({name: module(name) for name in MODULES})
__all__ = ["FusedLayerNorm", "huggingface", *MODULES]
