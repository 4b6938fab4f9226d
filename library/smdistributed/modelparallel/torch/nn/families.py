"""Models of transformers as data: names of their modules, and arguments of `smp.nn` that their configuration gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from smdistributed.modelparallel.backend.exceptions import SMPUnsupportedError


@dataclass(frozen=True)
class Family:
    """A kind of models. In names of layers, `{}` is the number.

    models: The classes that are replaced.
    layer: The name of a layer, there and here. Empty names: all that is before a name in it, if there is anything.
    inside: Names in a layer, by transformers' names. Several names here share the rows of one there, in equal parts.
        Without a name here, tensors are left out. Without a name there, they are another module's.
    arguments: A string names an attribute of the configuration, a function computes from it, all else is a value.
    outside: Other names.
    transposed: Whether weights of layers are [in, out].
    per_head: Whether a fused tensor has query, key and value of each head together.
    """

    models: tuple[str, ...]
    layer: tuple[str, str]
    inside: Mapping[str, str | tuple[str, ...]]
    arguments: Mapping[str, Any]
    outside: Mapping[str, str]
    transposed: bool = False
    per_head: bool = False


def _head_size(config: Any) -> int:
    return int(config.hidden_size // config.num_attention_heads)


def _intermediate_size(config: Any) -> int:
    return int(getattr(config, "n_inner", None) or getattr(config, "intermediate_size", None) or 4 * config.hidden_size)


def _layernorm_epsilon(config: Any) -> float:
    return float(getattr(config, "layer_norm_epsilon", None) or config.layer_norm_eps)


def _is_tied(config: Any) -> bool:
    return bool(getattr(config, "tie_word_embeddings", True))


def _has_bias(config: Any) -> bool:
    return bool(getattr(config, "attention_bias", True))


def _local_layers(config: Any) -> list[dict[str, Any]]:
    return [{"window_size": config.window_size if kind == "local" else None} for kind in config.attention_layers]


def _rope(config: Any) -> Mapping[str, Any]:
    """Returns parameters of the rotary embedding; raises SMPUnsupportedError if it is scaled."""
    rope: Mapping[str, Any] = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise SMPUnsupportedError("its rotary embedding is scaled. Fix: leave it out of tensor parallelism.")
    return rope


def _neox_rotary_dim(config: Any) -> int:
    return int(_head_size(config) * _rope(config).get("partial_rotary_factor", getattr(config, "rotary_pct", 1.0)))


def _neox_rotary_base(config: Any) -> float:
    return float(_rope(config).get("rope_theta", getattr(config, "rotary_emb_base", 10000.0)))


_QKV = ("attention.query", "attention.key", "attention.value")
_COMMON = {
    "num_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "attention_head_size": _head_size,
    "hidden_size": "hidden_size",
    "intermediate_size": _intermediate_size,
    "layernorm_epsilon": _layernorm_epsilon,
}
_GPT = {
    **_COMMON,
    "vocab_size": "vocab_size",
    "tie_weights": _is_tied,
    "num_positions": "max_position_embeddings",
    "causal_mask_size": "max_position_embeddings",
    "pre_layernorm": True,
    "post_layernorm": False,
}
_OPENAI = {
    **_GPT,
    "attention_dropout_prob": "attn_pdrop",
    "hidden_dropout_prob": "resid_pdrop",
    "activation": "activation_function",
}
_GPT_LAYER = ("transformer.h.{}", "transformer.seq_layers.{}")
_GPT_OUTSIDE = {
    "transformer.wte": "word_embedding",
    "transformer.wpe": "position_embedding",
    "transformer.ln_f": "layernorm",
    "lm_head": "lm_head",
}
GPT2 = Family(
    models=("GPT2LMHeadModel",),
    layer=_GPT_LAYER,
    inside={
        "ln_1": "attention.pre_layernorm",
        "attn.c_attn": _QKV,
        "attn.c_proj": "attention.dense",
        "ln_2": "output.pre_layernorm",
        "mlp.c_fc": "output.dense1",
        "mlp.c_proj": "output.dense2",
        "attn": (),  # masks of old releases
    },
    arguments={
        **_OPENAI,
        "scale_attention_scores": "scale_attn_weights",
        "scale_attn_by_layer_idx": "scale_attn_by_inverse_layer_idx",
        "attention_in_fp32": "reorder_and_upcast_attn",
    },
    outside=_GPT_OUTSIDE,
    transposed=True,
)
GPTJ = Family(
    models=("GPTJForCausalLM",),
    layer=_GPT_LAYER,
    inside={
        "ln_1": "attention.pre_layernorm",
        "": "output.pre_layernorm",
        **{f"attn.{name}_proj": ours for name, ours in zip("qkv", _QKV)},
        "attn.out_proj": "attention.dense",
        "mlp.fc_in": "output.dense1",
        "mlp.fc_out": "output.dense2",
        "attn": (),
    },
    arguments={
        **_OPENAI,
        "num_positions": 0,
        "rotary_dim": lambda config: config.rotary_dim or _head_size(config),
        "parallel_attn_output": True,
        "single_pre_layernorm": True,
        "query_key_value_bias": False,
        "dense_bias": False,
        "lm_head_bias": True,
    },
    outside=_GPT_OUTSIDE,
)
GPTNEO = Family(
    models=("GPTNeoForCausalLM",),
    layer=_GPT_LAYER,
    inside={
        "ln_1": "attention.pre_layernorm",
        **{f"attn.attention.{name}_proj": ours for name, ours in zip("qkv", _QKV)},
        "attn.attention.out_proj": "attention.dense",
        "ln_2": "output.pre_layernorm",
        "mlp.c_fc": "output.dense1",
        "mlp.c_proj": "output.dense2",
        "attn.attention": (),
    },
    arguments={
        **_GPT,
        "attention_dropout_prob": "attention_dropout",
        "hidden_dropout_prob": "resid_dropout",
        "activation": "activation_function",
        "scale_attention_scores": False,
        "query_key_value_bias": False,
        "layers": _local_layers,
    },
    outside=_GPT_OUTSIDE,
)
GPTNEOX = Family(
    models=("GPTNeoXForCausalLM",),
    layer=("gpt_neox.layers.{}", "transformer.seq_layers.{}"),
    inside={
        "input_layernorm": "attention.pre_layernorm",
        "post_attention_layernorm": "output.pre_layernorm",
        "attention.query_key_value": _QKV,
        "attention.dense": "attention.dense",
        "mlp.dense_h_to_4h": "output.dense1",
        "mlp.dense_4h_to_h": "output.dense2",
        "attention": (),
        "attention.rotary_emb": (),
    },
    arguments={
        **_GPT,
        "num_positions": 0,
        "attention_dropout_prob": "attention_dropout",
        "hidden_dropout_prob": "hidden_dropout",
        "activation": "hidden_act",
        "rotary_dim": _neox_rotary_dim,
        "rotary_emb_base": _neox_rotary_base,
        "gpt_neox_type_rotary": True,
        "parallel_attn_output": "use_parallel_residual",
        "query_key_value_bias": _has_bias,
        "dense_bias": _has_bias,
    },
    outside={
        "gpt_neox.embed_in": "word_embedding",
        "gpt_neox.final_layer_norm": "layernorm",
        "lm_head": "lm_head",
        "embed_out": "lm_head",  # of transformers 4
    },
    per_head=True,
)
BERT = Family(
    models=("BertEncoder", "RobertaEncoder"),
    layer=("layer.{}", "seq_layers.{}"),
    inside={
        **{f"attention.self.{ours.split('.')[1]}": ours for ours in _QKV},
        "attention.output.dense": "attention.dense",
        "attention.output.LayerNorm": "attention.layernorm",
        "intermediate.dense": "output.dense1",
        "output.dense": "output.dense2",
        "output.LayerNorm": "output.layernorm",
    },
    arguments={
        **_COMMON,
        "attention_dropout_prob": "attention_probs_dropout_prob",
        "hidden_dropout_prob": "hidden_dropout_prob",
        "activation": "hidden_act",
    },
    outside={},
)
FAMILIES = {model: family for family in (GPT2, GPTJ, GPTNEO, GPTNEOX, BERT) for model in family.models}
"""By the class that is replaced."""
_MODEL_ONLY = ("num_layers", "vocab_size", "tie_weights", "num_positions")
GPT2_BLOCK = replace(
    GPT2,
    models=("GPT2Block",),
    layer=("", ""),
    arguments={name: source for name, source in GPT2.arguments.items() if name not in _MODEL_ONLY},
    outside={},
)
"""A layer that is replaced alone: `get_hf_gpt2_transformer_layer_hooks`."""
PUBLISHED: dict[str, dict[str, Family]] = {
    "bert": {
        "hf_state_dict_to_smdistributed": BERT,
        "hf_state_dict_to_smdistributed_bert": BERT,
        "state_dict_to_hf_bert": BERT,
    },
    "gpt2": {
        "hf_state_dict_to_smdistributed": GPT2,
        "hf_state_dict_to_smdistributed_gpt2": GPT2,
        "state_dict_to_hf_gpt2": GPT2,
        "hf_block_state_dict_to_smdistributed": GPT2_BLOCK,
        "layer_state_dict_to_hf_gpt2_block": GPT2_BLOCK,
    },
    "gptj": {
        "hf_gptj_state_dict_to_smdistributed": GPTJ,
        "hf_gptj_state_dict_to_smdistributed_gptj": GPTJ,
        "hf_state_dict_to_smdistributed_gptj": GPTJ,
        "state_dict_to_hf_gptj": GPTJ,
    },
    "gptneo": {
        "hf_gptneo_state_dict_to_smdistributed": GPTNEO,
        "hf_state_dict_to_smdistributed_gptneo": GPTNEO,
        "state_dict_to_hf_gptneo": GPTNEO,
    },
    "roberta": {
        "hf_state_dict_to_smdistributed": BERT,
        "hf_state_dict_to_smdistributed_roberta": BERT,
        "state_dict_to_hf_roberta": BERT,
        "state_dict_to_smdistributed": BERT,
    },
}
"""By AWS's name of a module, its functions that translate state dicts, without `translate_` before the name."""
