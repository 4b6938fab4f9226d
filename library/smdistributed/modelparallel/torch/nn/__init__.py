"""Modules of AWS API 1.6: FusedLayerNorm, and the names of the tensor-parallel ones."""

from __future__ import annotations

from torch import nn

from smdistributed.modelparallel.torch.nn import huggingface
from smdistributed.modelparallel.torch.script.unsupported import MODULES, unsupported_module


class FusedLayerNorm(nn.LayerNorm):
    """torch's LayerNorm, which is one kernel too. Scripts look for this class to exclude it from weight decay."""


globals().update({name: unsupported_module(name) for name in MODULES})
__all__ = ["FusedLayerNorm", "huggingface", *MODULES]
