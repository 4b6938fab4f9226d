"""Tensor-parallel versions of torch's Linear, Embedding and LayerNorm (AWS API 1.6)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from smdistributed.modelparallel.backend.exceptions import SMPUnsupportedError
from smdistributed.modelparallel.torch.nn.module import DistributedModule, require_divisible
from smdistributed.modelparallel.torch.nn.tensor_group import (
    channels_to_rows,
    gather_rows,
    rows_to_channels,
    sum_over_group,
    sum_partial,
    tensor_group,
)


class DistributedLinear(DistributedModule):
    """torch's Linear, with the input channels split over TP_GROUP (AWS API 1.6).

    Input [N, ..., in_features] and output [N, ..., out_features] are as in torch. Every rank has the bias.

    Args:
        in_features: The number of input channels, over all ranks.
        out_features: The number of output channels.
        bias: Whether it adds a bias. Ours.

    Raises:
        SMPUnsupportedError: If `tensor_parallel_degree` does not divide `in_features`.
        StepUsageError: Before `smp.init`.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self._take(nn.Linear(in_features, out_features, bias))

    @classmethod
    def from_plain(cls, plain: nn.Linear) -> DistributedLinear:
        """Returns the tensor-parallel version of a module, with its weights. Its Parameter objects stay."""
        require_divisible("in_features of Linear", plain.in_features)
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._take(plain)
        return made

    def _take(self, plain: nn.Linear) -> None:
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.weight, self.bias = plain.weight, plain.bias
        self.split_parameter("weight", 1)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 (torch's name)
        if input.dim() == 1:  # one row, without an axis for it
            return self(input[None])[0]  # type: ignore[no-any-return]
        output = sum_partial(functional.linear(rows_to_channels(input), self.weight))
        return output if self.bias is None else output + self.bias

    def extra_repr(self) -> str:
        """As torch's Linear."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class DistributedEmbedding(DistributedModule):
    """torch's Embedding, with `embedding_dim` split over TP_GROUP (AWS API 1.6).

    Args:
        num_embeddings: See torch.nn.Embedding.
        embedding_dim: The size of each vector, over all ranks.
        padding_idx: See torch.nn.Embedding.
        max_norm: Must be None: each rank would use the norm of its share.
        norm_type: No effect without `max_norm`.
        scale_grad_by_freq: See torch.nn.Embedding. Must be False if ranks have rows of their own.
        sparse: Must be False.
        _weight: The initial weights, whole. None: a normal distribution with `initializer_range`.
        initializer_range: The standard deviation of the initial weights.
        _skip_allgather: Whether `forward` gets the rows of all ranks already.
        _skip_scatter_and_merge: Whether `forward` returns this rank's channels for the rows of all ranks.

    Raises:
        SMPUnsupportedError: If `tensor_parallel_degree` does not divide `embedding_dim`, or for the arguments above.
        StepUsageError: Before `smp.init`.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: torch.Tensor | None = None,
        initializer_range: float = 0.02,
        _skip_allgather: bool = False,
        _skip_scatter_and_merge: bool = False,
    ) -> None:
        super().__init__()
        plain = nn.Embedding(
            num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse, _weight
        )
        if _weight is None:
            with torch.no_grad():
                plain.weight.normal_(0.0, initializer_range)
                if plain.padding_idx is not None:
                    plain.weight[plain.padding_idx].zero_()
        self._take(plain)
        self._skip_allgather, self._skip_scatter = _skip_allgather, _skip_scatter_and_merge

    @classmethod
    def from_plain(cls, plain: nn.Embedding) -> DistributedEmbedding:
        """Returns the tensor-parallel version of a module, with its weights. Its Parameter objects stay."""
        require_divisible("embedding_dim of Embedding", plain.embedding_dim)
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._take(plain)
        return made

    def _take(self, plain: nn.Embedding) -> None:
        frequencies = plain.scale_grad_by_freq and not tensor_group().same_rows
        if plain.max_norm is not None or plain.sparse or (frequencies and tensor_group().size > 1):
            raise SMPUnsupportedError(
                "DistributedEmbedding has max_norm, sparse, or scale_grad_by_freq without 'prescaled_batch': vectors "
                "are split over ranks. Fix: leave these out, or leave the embedding out of tensor parallelism."
            )
        self.num_embeddings, self.embedding_dim = plain.num_embeddings, plain.embedding_dim
        self.padding_idx, self.scale_grad_by_freq = plain.padding_idx, plain.scale_grad_by_freq
        self._skip_allgather = self._skip_scatter = False
        self.weight = plain.weight
        self.split_parameter("weight", 1)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 (torch's name)
        rows = input if self._skip_allgather else gather_rows(input)
        found = functional.embedding(rows, self.weight, self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq)
        return found if self._skip_scatter else channels_to_rows(found)

    def extra_repr(self) -> str:
        """As torch's Embedding."""
        return f"{self.num_embeddings}, {self.embedding_dim}"


class DistributedLayerNorm(DistributedModule):
    """torch's LayerNorm over the last axis, with its channels split over TP_GROUP (AWS API 1.6).

    Input and output are [N, ..., normalized_shape]. Means and variances are computed in float32, over all ranks.

    Args:
        normalized_shape: The number of channels, over all ranks.
        eps: Added to the variance.

    Raises:
        SMPUnsupportedError: If `tensor_parallel_degree` does not divide the number of channels.
        StepUsageError: Before `smp.init`.
    """

    def __init__(self, normalized_shape: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.normalized_shape, self.eps = normalized_shape, eps
        self.weight, self.bias = nn.Parameter(torch.ones(normalized_shape)), nn.Parameter(torch.zeros(normalized_shape))
        for name in ("weight", "bias"):
            self.split_parameter(name, 0)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 (torch's name)
        channels = rows_to_channels(input).float()
        centered = channels - sum_over_group(channels.sum(-1, keepdim=True)) / self.normalized_shape
        variance = sum_over_group(centered.square().sum(-1, keepdim=True)) / self.normalized_shape
        normalized = (centered * (variance + self.eps).rsqrt()).to(input.dtype)
        return channels_to_rows(normalized * self.weight + self.bias)


class FusedLayerNorm(nn.LayerNorm):
    """torch's LayerNorm, which is one kernel too. Scripts look for this class to exclude it from weight decay."""
