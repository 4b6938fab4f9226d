"""Modules of AWS API 1.6: the tensor-parallel ones, and FusedLayerNorm."""

from __future__ import annotations

from torch import nn

from smdistributed.modelparallel.torch.nn import huggingface
from smdistributed.modelparallel.torch.nn.layers import DistributedEmbedding, DistributedLinear
from smdistributed.modelparallel.torch.nn.module import DistributedModule
from smdistributed.modelparallel.torch.nn.unsupported import MODULES, unsupported_module


class FusedLayerNorm(nn.LayerNorm):
    """torch's LayerNorm, which is one kernel too. Scripts look for this class to exclude it from weight decay."""


globals().update({name: unsupported_module(name) for name in MODULES})
__all__ = [
    "DistributedEmbedding",
    "DistributedLinear",
    "DistributedModule",
    "FusedLayerNorm",
    "huggingface",
    *MODULES,
]
