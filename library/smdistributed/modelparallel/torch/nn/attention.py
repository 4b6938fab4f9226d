"""Attention with heads split over TP_GROUP (AWS API 1.6), and the plain attention that FlashAttentionLayer shares."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from smdistributed.core.options import warn_without_effect
from smdistributed.modelparallel.backend.exceptions import SMPUnsupportedError
from smdistributed.modelparallel.torch.nn.layers import FusedLayerNorm
from smdistributed.modelparallel.torch.nn.module import DistributedModule, require_divisible
from smdistributed.modelparallel.torch.nn.tensor_group import (
    gather_rows,
    share_rows,
    sum_partial,
    tensor_group,
)
from smdistributed.modelparallel.torch.pipeline.tasks import derive_seed, draw_seed


class ColumnLinear(DistributedModule):
    """A Linear with split output channels. Its input has the rows of all ranks (`share_rows`)."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = plain.weight, plain.bias
        self.split_parameter("weight", 0)
        if self.bias is not None:
            self.split_parameter("bias", 0)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return functional.linear(rows, self.weight, self.bias)


class RowLinear(DistributedModule):
    """A Linear with split input channels. Its input is a result of `ColumnLinear`; its output has this rank's rows."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = plain.weight, plain.bias
        self.split_parameter("weight", 1)

    def forward(self, share: torch.Tensor) -> torch.Tensor:
        output = sum_partial(functional.linear(share, self.weight))
        return output if self.bias is None else output + self.bias


def make_linear(inputs: int, outputs: int, bias: bool, deviation: float | None) -> nn.Linear:
    """Makes a Linear. `deviation`: of normally distributed weights, with biases of 0; None: torch's initial values."""
    made = nn.Linear(inputs, outputs, bias)
    if deviation is not None:
        nn.init.normal_(made.weight, 0.0, deviation)
        if bias:
            nn.init.zeros_(made.bias)
    return made


@contextmanager
def own_random(used: bool) -> Iterator[None]:
    """Draws random numbers inside `with` that differ on the ranks of TP_GROUP: each has other heads.

    Afterwards the default generators have drawn one number, on every rank.
    """
    own = tensor_group()
    if own.size == 1 or not used:
        yield
        return
    seed = derive_seed(draw_seed(), own.seed, own.rank)
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


class DistributedAttentionLayer(DistributedModule):
    """Self- or cross-attention with its projections, dropout, residual connection and LayerNorm (AWS API 1.6).

    The input is `(hidden_states, attention_mask)`, or `(hidden_states, cross_states, attention_mask)` with
    `cross_attention`. States are [N, S, hidden_size]. The mask is added to the scores, [N, 1, 1, S] or None. It returns
    one tensor, [N, S, hidden_size].

    The residual is added with and without `post_layernorm`, as in GPT-2. AWS's reference code adds it with it only.

    Args:
        num_attention_heads: The number of heads, over all ranks.
        attention_head_size: The number of channels of a head.
        hidden_size: The number of channels of the states.
        attention_dropout_prob: The dropout of attention probabilities.
        hidden_dropout_prob: The dropout of the output.
        layernorm_epsilon: Of LayerNorm.
        initializer_range: The standard deviation of initial weights, with `use_normal_initialization`.
        use_normal_initialization: Whether weights begin with a normal distribution; otherwise as torch's Linear.
        cross_attention: Whether keys and values come from `cross_states`.
        causal_mask_size: The longest sequence that a causal mask is for; None: no causal mask.
        pre_layernorm: Whether the input is normalised.
        post_layernorm: Whether the sum with the residual is normalised.
        fp32_residual_addition: Whether the residual is added in float32.
        attention_in_fp32: Whether attention is computed in float32.
        query_key_layer_scaling: No effect: torch computes the softmax in float32.
        use_alibi: Whether scores get a bias that is linear in the distance. The number of heads must be a power of 2.
        alibi_bias_max: The exponent of the smallest slope.
        scale_attention_scores: Whether scores are divided by the root of the head's size.
        scale_attn_by_layer_idx: Whether scores are divided by the layer's number from 1 on.
        layer_idx: The layer's number from 0 on.
        rotary_dim: How many channels of a head are rotated by their position; None: none.
        rotary_emb_base: The base of the rotation's frequencies.
        gpt_neox_type_rotary: Whether a channel is rotated with the one half a head away; otherwise with its neighbour.
        query_key_value_bias: Whether the projections of the input have biases. Ours.
        dense_bias: Whether the projection of the output has one. Ours.
        window_size: How many positions back a causal mask lets through; None: all. Ours.

    Raises:
        SMPUnsupportedError: If the degree does not divide the number of heads, or for another argument.
        StepUsageError: Before `smp.init`.
    """

    def __init__(
        self,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        cross_attention: bool = False,
        causal_mask_size: int | None = None,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        fp32_residual_addition: bool = False,
        attention_in_fp32: bool = False,
        query_key_layer_scaling: bool = False,
        use_alibi: bool = False,
        alibi_bias_max: int = 8,
        scale_attention_scores: bool = True,
        scale_attn_by_layer_idx: bool = False,
        layer_idx: int | None = None,
        rotary_dim: int | None = None,
        rotary_emb_base: float = 10000.0,
        gpt_neox_type_rotary: bool = False,
        query_key_value_bias: bool = True,
        dense_bias: bool = True,
        window_size: int | None = None,
    ) -> None:
        super().__init__()
        require_layernorm(type(self).__name__, pre_layernorm, post_layernorm)
        require_divisible("num_attention_heads", num_attention_heads)
        if query_key_layer_scaling:
            warn_without_effect("query_key_layer_scaling", "torch computes the softmax in float32")
        if use_alibi and num_attention_heads & (num_attention_heads - 1):
            raise SMPUnsupportedError(
                f"use_alibi with {num_attention_heads} heads. Allowed: a power of 2. Fix: choose another number."
            )
        self.heads, self.head_size = num_attention_heads // tensor_group().size, attention_head_size
        self.cross_attention, self.causal_mask_size, self.window_size = cross_attention, causal_mask_size, window_size
        self.fp32_residual_addition, self.attention_in_fp32 = fp32_residual_addition, attention_in_fp32
        self.attention_dropout_prob, self.hidden_dropout_prob = attention_dropout_prob, hidden_dropout_prob
        self.scale = attention_scale(attention_head_size, scale_attention_scores, scale_attn_by_layer_idx, layer_idx)
        self.rotary_dim, self.rotary_base, self.rotates_halves = rotary_dim, rotary_emb_base, gpt_neox_type_rotary
        first = tensor_group().rank * self.heads
        slopes = alibi_slopes(num_attention_heads, alibi_bias_max) if use_alibi else []
        self.slopes = slopes[first : first + self.heads]
        deviation = initializer_range if use_normal_initialization else None
        inner = num_attention_heads * attention_head_size
        for name in ("query", "key", "value"):
            plain = make_linear(hidden_size, inner, query_key_value_bias, deviation)
            self.add_module(name, ColumnLinear(plain))
        self.dense = RowLinear(make_linear(inner, hidden_size, dense_bias, deviation))
        self.pre_layernorm = FusedLayerNorm(hidden_size, eps=layernorm_epsilon) if pre_layernorm else None
        self.layernorm = FusedLayerNorm(hidden_size, eps=layernorm_epsilon) if post_layernorm else None

    def forward(self, inputs: tuple[torch.Tensor | None, ...]) -> torch.Tensor:
        hidden, mask = inputs[0], inputs[-1]
        assert hidden is not None
        output = self.branch(inputs[:-1], mask)
        output = add_residual(hidden, output, self.fp32_residual_addition)
        return output if self.layernorm is None else self.layernorm(output)

    def branch(self, states: tuple[torch.Tensor | None, ...], mask: torch.Tensor | None) -> torch.Tensor:
        """Returns the output before the residual is added."""
        hidden: Any = states[0]
        rows = share_rows(hidden if self.pre_layernorm is None else self.pre_layernorm(hidden))
        other: Any = states[1] if self.cross_attention else None
        source = rows if other is None else share_rows(other)
        query, key, value = (
            self._split_heads(getattr(self, name)(given))
            for name, given in (("query", rows), ("key", source), ("value", source))
        )
        if self.rotary_dim is not None:
            query, key = (self._rotate(tensor) for tensor in (query, key))
        context = self._attend(query, key, value, rows_of_mask(mask, hidden))
        output = self.dense(context.transpose(1, 2).flatten(2))
        return functional.dropout(output, self.hidden_dropout_prob, self.training)

    def _split_heads(self, tensor: torch.Tensor) -> torch.Tensor:
        """[rows, S, channels] becomes [rows, heads, S, channels of a head]."""
        return tensor.view(*tensor.shape[:-1], self.heads, self.head_size).transpose(1, 2)

    def _rotate(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self.rotary_dim is not None
        return rotate(tensor, self.rotary_dim, self.rotary_base, self.rotates_halves)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        dtype = query.dtype
        if self.attention_in_fp32:
            query, key, value = query.float(), key.float(), value.float()
        causal = self.causal_mask_size is not None and not self.cross_attention
        if causal and query.shape[2] > (self.causal_mask_size or 0):
            raise ValueError(
                f"The sequence has {query.shape[2]} positions, and causal_mask_size is {self.causal_mask_size}. Fix: "
                "raise it, or cut the sequence."
            )
        if self.slopes:
            bias = alibi_bias(torch.tensor(self.slopes, device=query.device), key.shape[2]).to(query)
            mask = bias if mask is None else bias + mask.to(query)
        dropout = self.attention_dropout_prob if self.training else 0.0
        with own_random(dropout > 0):
            found = attend(query, key, value, mask, causal, self.scale, dropout, self.window_size)
        return found.to(dtype)


def require_layernorm(name: str, pre_layernorm: bool, post_layernorm: bool) -> None:
    if not (pre_layernorm or post_layernorm):
        raise SMPUnsupportedError(
            f"{name} has neither pre_layernorm nor post_layernorm. Fix: set at least one of them."
        )


def add_residual(hidden: torch.Tensor, output: torch.Tensor, in_fp32: bool) -> torch.Tensor:
    """Returns the sum, in the dtype of `output`."""
    return (hidden.float() + output.float()).to(output.dtype) if in_fp32 else hidden + output


def rows_of_mask(mask: torch.Tensor | None, hidden: torch.Tensor) -> torch.Tensor | None:
    """Returns the mask for the rows of all ranks. A mask without a row for each sample stays."""
    if mask is None or mask.dim() < 2 or mask.shape[0] != hidden.shape[0]:
        return mask
    return gather_rows(mask)


def attention_scale(size: int, by_size: bool, by_layer: bool, layer: int | None) -> float:
    """The factor of attention scores: 1 / (root of the head's size · number of the layer), by the chosen parts."""
    return (size**-0.5 if by_size else 1.0) / ((layer or 0) + 1 if by_layer else 1)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
    dropout: float,
    window: int | None = None,
) -> torch.Tensor:
    """Attention of [rows, heads, S, channels] by torch's scaled_dot_product_attention. `mask` is added to scores."""
    length, other = query.shape[2], key.shape[2]
    is_plain = mask is None and window is None and length == other
    if mask is not None and mask.dtype == torch.bool:  # True: seen
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
    if mask is not None:
        mask = mask.to(query.dtype).clamp(min=torch.finfo(query.dtype).min)  # a row of -inf alone would give NaN
    if causal and not is_plain:
        allowed = torch.ones(length, other, dtype=torch.bool, device=query.device).tril(other - length)
        if window is not None:
            allowed = allowed.triu(other - length - window + 1)
        hidden = torch.zeros(length, other, dtype=query.dtype, device=query.device)
        hidden = hidden.masked_fill(~allowed, torch.finfo(query.dtype).min)
        mask = hidden if mask is None else (mask + hidden).clamp(min=torch.finfo(query.dtype).min)
    # Old releases of torch have no argument for the scale: the query takes it.
    factor = scale * math.sqrt(query.shape[-1])
    return functional.scaled_dot_product_attention(
        query if factor == 1.0 else query * factor, key, value, mask, dropout, causal and is_plain
    )


def alibi_slopes(heads: int, largest: float) -> list[float]:
    return [2.0 ** (-largest * (head + 1) / heads) for head in range(heads)]


def alibi_bias(slopes: torch.Tensor, length: int) -> torch.Tensor:
    """Returns [1, heads, 1, length], by the distance to the last key. Softmax ignores the same amount in a row."""
    return (slopes[:, None] * torch.arange(1.0 - length, 1.0, device=slopes.device))[None, :, None, :]


def rotate(tensor: torch.Tensor, size: int, base: float, halves: bool) -> torch.Tensor:
    """Rotates the first `size` channels of [rows, heads, S, channels] by angles of their positions."""
    positions = torch.arange(tensor.shape[2], dtype=torch.float32, device=tensor.device)
    frequencies = base ** (-torch.arange(0, size, 2, dtype=torch.float32, device=tensor.device) / size)
    angles = positions[:, None] * frequencies
    cos, sin = angles.cos().to(tensor.dtype), angles.sin().to(tensor.dtype)
    rotated, rest = tensor[..., :size], tensor[..., size:]
    if halves:
        one, two = rotated.chunk(2, -1)
        return torch.cat((one * cos - two * sin, two * cos + one * sin, rest), -1)
    one, two = rotated[..., ::2], rotated[..., 1::2]
    pairs = torch.stack((one * cos - two * sin, two * cos + one * sin), -1).flatten(-2)
    return torch.cat((pairs, rest), -1)


class FlashAttentionLayer(nn.Module):
    """Attention by torch's scaled_dot_product_attention, without parameters (AWS API 1.13). Nothing is split.

    Args:
        attention_dropout_prob: The dropout of attention probabilities.
        attention_head_size: The head's size for the scale; None: the size of the input's heads.
        scale_attention_scores: Whether scores are divided by the root of the head's size.
        scale_attn_by_layer_idx: Whether scores are divided by the layer's number from 1 on.
        layer_idx: The layer's number from 0 on.
        scale: The factor of scores; it wins over the arguments before.
        triton_flash_attention: No effect: torch chooses the kernel.
        use_alibi: No effect alone: `attn_mask` has the bias.
    """

    def __init__(
        self,
        attention_dropout_prob: float = 0.1,
        attention_head_size: int | None = None,
        scale_attention_scores: bool = True,
        scale_attn_by_layer_idx: bool = False,
        layer_idx: int | None = None,
        scale: float | None = None,
        triton_flash_attention: bool = False,
        use_alibi: bool = False,
    ) -> None:
        super().__init__()
        if triton_flash_attention:
            warn_without_effect("triton_flash_attention", "torch chooses the kernel")
        if use_alibi:
            warn_without_effect("use_alibi of FlashAttentionLayer", "attn_mask has the bias")
        self.attention_dropout_prob, self.attention_head_size = attention_dropout_prob, attention_head_size
        self._parts = scale_attention_scores, scale_attn_by_layer_idx, layer_idx
        self.scale = scale

    def forward(self, qkv: torch.Tensor, attn_mask: torch.Tensor | None = None, causal: bool = False) -> torch.Tensor:
        """Returns the attention.

        Args:
            qkv: Queries, keys and values, [B, S, 3, heads, channels].
            attn_mask: Added to the scores, to be broadcast to [B, heads, S, S].
            causal: Whether a position sees no later ones.

        Returns:
            [B, heads, S, channels].
        """
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind()
        scale = attention_scale(self.attention_head_size or qkv.shape[-1], *self._parts)
        dropout = self.attention_dropout_prob if self.training else 0.0
        return attend(query, key, value, attn_mask, causal, scale if self.scale is None else self.scale, dropout)
