"""Modules of AWS API 1.6: the tensor-parallel ones, FlashAttentionLayer and FusedLayerNorm."""

from smdistributed.modelparallel.torch.nn import huggingface, split_layers  # noqa: F401 (it registers layers)
from smdistributed.modelparallel.torch.nn.attention import DistributedAttentionLayer, FlashAttentionLayer
from smdistributed.modelparallel.torch.nn.layers import (
    DistributedEmbedding,
    DistributedLayerNorm,
    DistributedLinear,
    FusedLayerNorm,
)
from smdistributed.modelparallel.torch.nn.module import DistributedModule
from smdistributed.modelparallel.torch.nn.transformer import (
    DistributedTransformer,
    DistributedTransformerLayer,
    DistributedTransformerLMHead,
    DistributedTransformerOutputLayer,
)

__all__ = [
    "DistributedAttentionLayer",
    "DistributedEmbedding",
    "DistributedLayerNorm",
    "DistributedLinear",
    "DistributedModule",
    "DistributedTransformer",
    "DistributedTransformerLMHead",
    "DistributedTransformerLayer",
    "DistributedTransformerOutputLayer",
    "FlashAttentionLayer",
    "FusedLayerNorm",
    "huggingface",
]
