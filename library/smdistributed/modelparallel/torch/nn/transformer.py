"""Transformer layers with heads and intermediate channels split over TP_GROUP (AWS API 1.6)."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from smdistributed.modelparallel.backend.exceptions import SMPUnsupportedError
from smdistributed.modelparallel.torch.nn.attention import (
    ColumnLinear,
    DistributedAttentionLayer,
    RowLinear,
    add_residual,
    make_linear,
    require_layernorm,
)
from smdistributed.modelparallel.torch.nn.layers import DistributedEmbedding, DistributedLinear, FusedLayerNorm
from smdistributed.modelparallel.torch.nn.module import DistributedModule, require_divisible
from smdistributed.modelparallel.torch.nn.tensor_group import share_rows

_tanh_gelu = functools.partial(functional.gelu, approximate="tanh")
ACTIVATIONS: dict[str, Any] = {
    "gelu": functional.gelu,
    "relu": functional.relu,
    "gelu_new": _tanh_gelu,
    "gelu_fast": _tanh_gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
}
"""By the names of AWS (gelu, relu) and Hugging Face."""


class DistributedTransformerOutputLayer(DistributedModule):
    """The two Linear modules of a transformer layer, with dropout, residual and LayerNorm (AWS API 1.6).

    The input and the output are [N, S, hidden_size]. The residual is added with and without `post_layernorm`.

    Args:
        hidden_size: The number of channels of the input and the output.
        intermediate_size: The number of channels between, over all ranks.
        hidden_dropout_prob: The dropout of the output.
        activation: A key of `ACTIVATIONS`.
        layernorm_epsilon: Of LayerNorm.
        initializer_range: See `DistributedAttentionLayer`.
        use_normal_initialization: See `DistributedAttentionLayer`.
        pre_layernorm: Whether the input is normalised.
        post_layernorm: Whether the sum with the residual is normalised.
        fp32_residual_addition: Whether the residual is added in float32.

    Raises:
        SMPUnsupportedError: For another activation, without LayerNorm, or if the degree does not divide
            `intermediate_size`.
        StepUsageError: Before `smp.init`.
    """

    def __init__(
        self,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        fp32_residual_addition: bool = False,
    ) -> None:
        super().__init__()
        require_layernorm(type(self).__name__, pre_layernorm, post_layernorm)
        require_divisible("intermediate_size", intermediate_size)
        if activation not in ACTIVATIONS:
            raise SMPUnsupportedError(
                f"activation is {activation!r}. Allowed: {', '.join(ACTIVATIONS)}. Fix: choose one of these."
            )
        self.activation, self.hidden_dropout_prob = activation, hidden_dropout_prob
        self.fp32_residual_addition = fp32_residual_addition
        deviation = initializer_range if use_normal_initialization else None
        self.dense1 = ColumnLinear(make_linear(hidden_size, intermediate_size, True, deviation))
        self.dense2 = RowLinear(make_linear(intermediate_size, hidden_size, True, deviation))
        self.pre_layernorm = FusedLayerNorm(hidden_size, eps=layernorm_epsilon) if pre_layernorm else None
        self.layernorm = FusedLayerNorm(hidden_size, eps=layernorm_epsilon) if post_layernorm else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output = add_residual(hidden, self.branch(hidden), self.fp32_residual_addition)
        return output if self.layernorm is None else self.layernorm(output)

    def branch(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the output before the residual is added."""
        rows = share_rows(hidden if self.pre_layernorm is None else self.pre_layernorm(hidden))
        output = self.dense2(ACTIVATIONS[self.activation](self.dense1(rows)))
        return functional.dropout(output, self.hidden_dropout_prob, self.training)


class DistributedTransformerLayer(DistributedModule):
    """A transformer layer: attention, perhaps cross-attention, and output layer (AWS API 1.6).

    Input and output are the same tuple: `(hidden_states, attention_mask)`, or with `add_cross_attention`
    `(hidden_states, cross_states, attention_mask, cross_mask)`. Shapes are as in `DistributedAttentionLayer`.

    Args:
        num_attention_heads: See `DistributedAttentionLayer`.
        attention_head_size: See `DistributedAttentionLayer`.
        hidden_size: See `DistributedAttentionLayer`.
        intermediate_size: See `DistributedTransformerOutputLayer`.
        attention_dropout_prob: See `DistributedAttentionLayer`.
        hidden_dropout_prob: See `DistributedAttentionLayer`.
        activation: See `DistributedTransformerOutputLayer`.
        layernorm_epsilon: Of LayerNorm.
        initializer_range: See `DistributedAttentionLayer`.
        use_normal_initialization: See `DistributedAttentionLayer`.
        causal_mask_size: See `DistributedAttentionLayer`.
        add_cross_attention: Whether a cross-attention follows the self-attention.
        pre_layernorm: See `DistributedAttentionLayer`.
        post_layernorm: See `DistributedAttentionLayer`.
        use_alibi: See `DistributedAttentionLayer`.
        alibi_bias_max: See `DistributedAttentionLayer`.
        fp32_residual_addition: See `DistributedAttentionLayer`.
        parallel_attn_output: Whether attention and output layer get the same input, and their outputs are added to it.
        single_pre_layernorm: With it: whether both use the LayerNorm of attention.
        **attention: More arguments of `DistributedAttentionLayer`.

    Raises:
        SMPUnsupportedError: See `DistributedAttentionLayer` and `DistributedTransformerOutputLayer`.
        StepUsageError: Before `smp.init`.
    """

    def __init__(
        self,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        use_alibi: bool = False,
        alibi_bias_max: int = 8,
        fp32_residual_addition: bool = False,
        parallel_attn_output: bool = False,
        single_pre_layernorm: bool = False,
        **attention: Any,
    ) -> None:
        super().__init__()
        if parallel_attn_output and (add_cross_attention or post_layernorm or not pre_layernorm):
            raise SMPUnsupportedError(
                "parallel_attn_output needs pre_layernorm=True, post_layernorm=False and add_cross_attention=False. "
                "Fix: set these."
            )
        common: dict[str, Any] = {
            "hidden_size": hidden_size,
            "hidden_dropout_prob": hidden_dropout_prob,
            "layernorm_epsilon": layernorm_epsilon,
            "initializer_range": initializer_range,
            "use_normal_initialization": use_normal_initialization,
            "pre_layernorm": pre_layernorm,
            "post_layernorm": post_layernorm,
            "fp32_residual_addition": fp32_residual_addition,
        }
        attention = {
            "num_attention_heads": num_attention_heads,
            "attention_head_size": attention_head_size,
            "attention_dropout_prob": attention_dropout_prob,
            **attention,
            **common,
        }
        self.add_cross_attention, self.parallel = add_cross_attention, parallel_attn_output
        self.attention = DistributedAttentionLayer(
            causal_mask_size=causal_mask_size, use_alibi=use_alibi, alibi_bias_max=alibi_bias_max, **attention
        )
        if add_cross_attention:
            self.cross_attention = DistributedAttentionLayer(cross_attention=True, **attention)
        self.output = DistributedTransformerOutputLayer(
            intermediate_size=intermediate_size, activation=activation, **common
        )
        if parallel_attn_output and single_pre_layernorm:
            self.output.pre_layernorm = self.attention.pre_layernorm

    def forward(self, inputs: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
        hidden: Any = inputs[0]
        if self.parallel:
            branches = self.attention.branch((hidden,), inputs[1]) + self.output.branch(hidden)
            return add_residual(hidden, branches, self.attention.fp32_residual_addition), inputs[1]
        if not self.add_cross_attention:
            return self.output(self.attention((hidden, inputs[1]))), inputs[1]
        _, cross, mask, cross_mask = inputs
        attended = self.cross_attention((self.attention((hidden, mask)), cross, cross_mask))
        return self.output(attended), cross, mask, cross_mask


class DistributedTransformer(DistributedModule):
    """A sequence of `DistributedTransformerLayer`s, `seq_layers` (AWS API 1.6). Input and output are their tuples.

    With both `pre_layernorm` and `post_layernorm`, its own input and output are normalised too.

    Args:
        num_layers: The number of layers.
        layers: Arguments of each layer that differ, in their order; None: none differ. Ours.
        **layer: Arguments of `DistributedTransformerLayer`, which also lists the errors.
    """

    def __init__(self, num_layers: int = 12, layers: list[dict[str, Any]] | None = None, **layer: Any) -> None:
        super().__init__()
        each = layers or [{} for _ in range(num_layers)]
        self.seq_layers = nn.Sequential(
            *(DistributedTransformerLayer(**{"layer_idx": i, **layer, **own}) for i, own in enumerate(each))
        )
        both = layer.get("pre_layernorm", False) and layer.get("post_layernorm", True)
        size, epsilon = layer.get("hidden_size", 1024), layer.get("layernorm_epsilon", 1e-5)
        self.pre_layernorm = FusedLayerNorm(size, eps=epsilon) if both else None
        self.layernorm = FusedLayerNorm(size, eps=epsilon) if both else None

    def forward(self, inputs: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
        if self.pre_layernorm is not None:
            inputs = (self.pre_layernorm(inputs[0]), *inputs[1:])
        outputs: tuple[torch.Tensor | None, ...] = self.seq_layers(inputs)
        return outputs if self.layernorm is None else (self.layernorm(outputs[0]), *outputs[1:])


class DistributedTransformerLMHead(DistributedModule):
    """Embeddings, a `DistributedTransformer` and a head that is tied to the word embedding (AWS API 1.6).

    The input is a tuple: `(input_ids, attention_mask, token_type_ids, position_ids, labels)`; with
    `add_cross_attention`, `cross_states` and `cross_mask` come before `labels`. All but the first may be None. Numbers
    and masks are [N, S]; a mask has 1 for hidden positions.

    The output is the logits, [N, S, vocab_size]; without `add_lm_head` the states. With labels it is `(loss, logits)`:
    the mean cross entropy, of the next token with a causal mask. Labels of -100 do not count.

    With `pre_layernorm` alone, the last states are normalised, as in GPT-2.

    Args:
        num_layers: The number of layers.
        vocab_size: The number of tokens.
        num_positions: The longest sequence; 0: there is no embedding of positions.
        num_token_types: The number of token types; 0: there is no embedding of them.
        add_lm_head: Whether there is a head.
        distribute_embedding: Whether the word embedding and the head are split along the channels.
        tie_weights: Whether the head has the weights of the word embedding. Ours.
        lm_head_bias: Whether the head has a bias. Ours.
        embedding_layernorm: Whether the sum of the embeddings is normalised. Ours.
        **layer: Arguments of `DistributedTransformer`, which also lists the errors.
    """

    def __init__(
        self,
        num_layers: int = 12,
        vocab_size: int = 30522,
        num_positions: int = 1024,
        num_token_types: int = 0,
        add_lm_head: bool = True,
        distribute_embedding: bool = False,
        tie_weights: bool = True,
        lm_head_bias: bool = False,
        embedding_layernorm: bool = False,
        **layer: Any,
    ) -> None:
        super().__init__()
        size, deviation = layer.get("hidden_size", 1024), layer.get("initializer_range", 0.02)
        epsilon = layer.get("layernorm_epsilon", 1e-5)
        word = nn.Embedding(vocab_size, size)
        nn.init.normal_(word.weight, 0.0, deviation)
        head = nn.Linear(size, vocab_size, lm_head_bias) if add_lm_head else None
        if head is not None and tie_weights:
            head.weight = word.weight
        self.word_embedding = DistributedEmbedding.from_plain(word) if distribute_embedding else word
        self.position_embedding = _make_embedding(num_positions, size, deviation)
        self.token_type_embedding = _make_embedding(num_token_types, size, deviation)
        self.embedding_layernorm = FusedLayerNorm(size, eps=epsilon) if embedding_layernorm else None
        self.dropout = nn.Dropout(layer.get("hidden_dropout_prob", 0.1))
        self.transformer = DistributedTransformer(num_layers, **layer)
        self.is_causal = layer.get("causal_mask_size") is not None
        self.add_cross_attention = bool(layer.get("add_cross_attention", False))
        only_before = layer.get("pre_layernorm", False) and not layer.get("post_layernorm", True)
        self.layernorm = FusedLayerNorm(size, eps=epsilon) if only_before else None
        self.lm_head = _make_head(head, word, distribute_embedding)

    def forward(self, inputs: tuple[torch.Tensor | None, ...]) -> Any:
        hidden = self.states(inputs)
        if self.lm_head is None:
            return hidden
        logits = self.lm_head(hidden)
        labels = inputs[-1]
        return logits if labels is None else (language_loss(logits, labels, self.is_causal), logits)

    def states(self, inputs: tuple[torch.Tensor | None, ...]) -> torch.Tensor:
        """Returns the states before the head, [N, S, hidden_size]."""
        ids, mask, types, positions = inputs[:4]
        assert ids is not None
        hidden = self.word_embedding(ids)
        if self.position_embedding is not None:
            if positions is None:
                positions = torch.arange(ids.shape[1], device=ids.device)[None]
            hidden = hidden + self.position_embedding(positions)
        if self.token_type_embedding is not None and types is not None:
            hidden = hidden + self.token_type_embedding(types)
        if self.embedding_layernorm is not None:
            hidden = self.embedding_layernorm(hidden)
        hidden = self.dropout(hidden)
        added = _added_to_scores(mask, hidden.dtype)
        given: tuple[torch.Tensor | None, ...] = (hidden, added)
        if self.add_cross_attention:
            given = (hidden, inputs[4], added, _added_to_scores(inputs[5], hidden.dtype))
        states: torch.Tensor = self.transformer(given)[0]
        return states if self.layernorm is None else self.layernorm(states)


def _make_embedding(count: int, size: int, deviation: float) -> nn.Embedding | None:
    if not count:
        return None
    made = nn.Embedding(count, size)
    nn.init.normal_(made.weight, 0.0, deviation)
    return made


def _make_head(head: nn.Linear | None, word: nn.Embedding, distribute: bool) -> nn.Module | None:
    """Returns a head that has the word embedding's Parameter if `head` has: it is split already."""
    if head is None or not distribute:
        return head
    return DistributedLinear.from_plain(head)


def language_loss(logits: torch.Tensor, labels: torch.Tensor, is_causal: bool) -> torch.Tensor:
    if is_causal:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def _added_to_scores(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Turns a mask [N, S] with 1 for hidden positions into one that is added to scores."""
    return None if mask is None else mask[:, None, None, :].to(dtype) * torch.finfo(dtype).min
