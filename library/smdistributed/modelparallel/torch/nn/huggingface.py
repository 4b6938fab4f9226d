"""Hugging Face's models: tensor-parallel versions, and translations of their state dicts both ways (AWS API 1.7).

`smp.DistributedModel` replaces marked models of `FAMILIES`, with their weights. A table gives for each family the names
of Hugging Face and of `smp.nn`, so that one function translates in either direction. Nothing here imports transformers.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.backend.exceptions import SMPUnsupportedError
from smdistributed.modelparallel.torch.nn.module import copy_split, split_of, take_share
from smdistributed.modelparallel.torch.nn.replacement import Registration, register_late
from smdistributed.modelparallel.torch.nn.transformer import DistributedTransformer, DistributedTransformerLMHead
from smdistributed.modelparallel.torch.plan.construction import delay_param_initialization

TRANSLATIONS = {
    "bert": "hf_state_dict_to_smdistributed hf_state_dict_to_smdistributed_bert state_dict_to_hf_bert",
    "gpt2": "hf_state_dict_to_smdistributed hf_state_dict_to_smdistributed_gpt2 state_dict_to_hf_gpt2",
    "gptj": (
        "hf_gptj_state_dict_to_smdistributed hf_gptj_state_dict_to_smdistributed_gptj "
        "hf_state_dict_to_smdistributed_gptj state_dict_to_hf_gptj"
    ),
    "gptneo": "hf_state_dict_to_smdistributed_gptneo state_dict_to_hf_gptneo",
    "roberta": (
        "hf_state_dict_to_smdistributed hf_state_dict_to_smdistributed_roberta "
        "state_dict_to_hf_roberta state_dict_to_smdistributed"
    ),
}
"""The published functions of each module, without `translate_` before the name."""
__all__ = ["bert", "gpt2", "gptj", "gptneo", "roberta"]
_Weights = Mapping[str, torch.Tensor]
_QKV = ("query", "key", "value")


@dataclass(frozen=True)
class Family:
    """The names of a kind of models. Layers are `layer` with `{}` for the number, here and there.

    `inside`: names in a layer. `outside`: other names. Several names here can share the rows of one name there, in
    equal parts. `transposed`: whether weights of layers are [in, out].
    """

    layer: tuple[str, str]
    inside: Mapping[str, str | tuple[str, ...]]
    outside: Mapping[str, str]
    transposed: bool = False
    per_head: bool = False
    """Whether a fused tensor has query, key and value of each head together."""
    shared: str | None = None
    """A module of our layers that another one's name stands for too."""


def _family_of_gpt2() -> Family:
    inside: dict[str, str | tuple[str, ...]] = {
        "ln_1": "attention.pre_layernorm",
        "attn.c_attn": tuple(f"attention.{name}" for name in _QKV),
        "attn.c_proj": "attention.dense",
        "ln_2": "output.pre_layernorm",
        "mlp.c_fc": "output.dense1",
        "mlp.c_proj": "output.dense2",
    }
    return Family(("transformer.h.{}", "transformer.seq_layers.{}"), inside, _GPT_OUTSIDE, transposed=True)


_GPT_OUTSIDE = {
    "transformer.wte": "word_embedding",
    "transformer.wpe": "position_embedding",
    "transformer.ln_f": "layernorm",
    "lm_head": "lm_head",
}
_BERT_INSIDE: dict[str, str | tuple[str, ...]] = {
    **{f"attention.self.{name}": f"attention.{name}" for name in _QKV},
    "attention.output.dense": "attention.dense",
    "attention.output.LayerNorm": "attention.layernorm",
    "intermediate.dense": "output.dense1",
    "output.dense": "output.dense2",
    "output.LayerNorm": "output.layernorm",
}
FAMILIES = {
    "gpt2": _family_of_gpt2(),
    "gptj": Family(
        ("transformer.h.{}", "transformer.seq_layers.{}"),
        {
            "ln_1": "attention.pre_layernorm",
            **{f"attn.{name[0]}_proj": f"attention.{name}" for name in _QKV},
            "attn.out_proj": "attention.dense",
            "mlp.fc_in": "output.dense1",
            "mlp.fc_out": "output.dense2",
        },
        _GPT_OUTSIDE,
        shared="output.pre_layernorm",
    ),
    "gptneo": Family(
        ("transformer.h.{}", "transformer.seq_layers.{}"),
        {
            "ln_1": "attention.pre_layernorm",
            **{f"attn.attention.{name[0]}_proj": f"attention.{name}" for name in _QKV},
            "attn.attention.out_proj": "attention.dense",
            "ln_2": "output.pre_layernorm",
            "mlp.c_fc": "output.dense1",
            "mlp.c_proj": "output.dense2",
        },
        _GPT_OUTSIDE,
    ),
    "gptneox": Family(
        ("gpt_neox.layers.{}", "transformer.seq_layers.{}"),
        {
            "input_layernorm": "attention.pre_layernorm",
            "post_attention_layernorm": "output.pre_layernorm",
            "attention.query_key_value": tuple(f"attention.{name}" for name in _QKV),
            "attention.dense": "attention.dense",
            "mlp.dense_h_to_4h": "output.dense1",
            "mlp.dense_4h_to_h": "output.dense2",
        },
        {
            "gpt_neox.embed_in": "word_embedding",
            "gpt_neox.final_layer_norm": "layernorm",
            "embed_out": "lm_head",  # of transformers 4
            "lm_head": "lm_head",
        },
        per_head=True,
    ),
    "bert": Family(("encoder.layer.{}", "encoder.seq_layers.{}"), _BERT_INSIDE, {}),
    "roberta": Family(("encoder.layer.{}", "encoder.seq_layers.{}"), _BERT_INSIDE, {}),
}


# --- translation


def to_smdistributed(family: Family, weights: _Weights, heads: int = 1) -> dict[str, torch.Tensor]:
    """Translates Hugging Face's state dict. Other names stay. Tensors are views of the given ones.

    `heads`: the number of attention heads, for families with `per_head`.
    """
    found: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        targets = _targets(family, name)
        if targets is None or targets == (name,):  # it may be a part of a sharded tensor
            found[name] = tensor
            continue
        if family.transposed and tensor.dim() == 2 and _is_inside(family, name):
            tensor = tensor.t()
        if targets:
            found.update(zip(targets, _divide(tensor, len(targets), heads if family.per_head else 1)))
    return found


def to_huggingface(family: Family, weights: _Weights, heads: int = 1) -> dict[str, torch.Tensor]:
    """Translates a state dict of `smp.nn` back. The inverse of `to_smdistributed`."""
    found: dict[str, torch.Tensor] = {}
    sources = {target: name for name in _hf_names(family, weights) for target in _targets(family, name) or ()}
    for name, tensor in weights.items():
        source = sources.get(name)
        if source is None and family.shared is not None and f".{family.shared}." in name:
            continue
        if source is None:
            found[name] = tensor
        elif source not in found:
            targets = _targets(family, source) or ()
            whole = _join([weights[target] for target in targets], heads if family.per_head else 1)
            is_matrix = family.transposed and whole.dim() == 2 and _is_inside(family, source)
            found[source] = whole.t().contiguous() if is_matrix else whole
    return found


def _divide(tensor: torch.Tensor, count: int, heads: int) -> list[torch.Tensor]:
    """Divides rows into `count` tensors. With `heads`, each head has its rows of all of them together."""
    if count == 1 or heads == 1:
        return list(tensor.chunk(count))
    apart = tensor.view(heads, count, -1, *tensor.shape[1:])
    return [apart[:, place].reshape(-1, *tensor.shape[1:]) for place in range(count)]


def _join(parts: list[torch.Tensor], heads: int) -> torch.Tensor:
    if len(parts) == 1 or heads == 1:
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    rest = parts[0].shape[1:]
    return torch.stack([part.reshape(heads, -1, *rest) for part in parts], 1).reshape(-1, *rest)


def _is_inside(family: Family, name: str) -> bool:
    return re.search(_pattern(family.layer[0]), name) is not None


def _pattern(layer: str) -> str:
    return r"(^|\.)" + re.escape(layer).replace(r"\{\}", r"(\d+)") + r"\.(.+)\.(weight|bias)$"


def _targets(family: Family, name: str) -> tuple[str, ...] | None:
    """Our names for a name of Hugging Face; None for one that is not of this family, empty for one that is left out."""
    if re.search(r"\.(h|layers)\.\d+\.(attn|attention)(\.attention)?\.(bias|masked_bias|rotary_emb\.inv_freq)$", name):
        return ()  # masks and frequencies in checkpoints of old releases
    inside = re.search(_pattern(family.layer[0]), name)
    if inside:
        before, number, key, kind = name[: inside.start()] + inside[1], *inside.groups()[1:]
        ours = family.inside.get(key)
        if ours is None:
            return None
        layer = family.layer[1].format(number)
        return tuple(f"{before}{layer}.{each}.{kind}" for each in (ours if isinstance(ours, tuple) else (ours,)))
    owner, _, kind = name.rpartition(".")
    return (f"{family.outside[owner]}.{kind}",) if owner in family.outside else None


def _hf_names(family: Family, weights: _Weights) -> Iterator[str]:
    """Yields Hugging Face's names that the names of a state dict from here can have."""
    layer = re.compile(r"(^|.*\.)" + re.escape(family.layer[1]).replace(r"\{\}", r"(\d+)") + r"\.")
    layers = dict.fromkeys((m[1], m[2]) for m in map(layer.match, weights) if m)
    for before, number in layers:
        for key in family.inside:
            yield from (f"{before}{family.layer[0].format(number)}.{key}.{kind}" for kind in ("weight", "bias"))
    for owner in family.outside:
        yield from (f"{owner}.{kind}" for kind in ("weight", "bias"))


def _make_translation(name: str, family: Family) -> Callable[..., Any]:
    """Makes the published function of that name."""
    back = name.startswith("translate_state_dict_to_hf")

    def translate(state_dict: _Weights, max_seq_len: int | None = None) -> dict[str, torch.Tensor]:
        return to_huggingface(family, state_dict) if back else to_smdistributed(family, state_dict)

    translate.__name__ = translate.__qualname__ = name
    source, target = ("smp.nn", "Hugging Face") if back else ("Hugging Face", "smp.nn")
    translate.__doc__ = (
        f"Translates a model's state dict from {source}'s names to {target}'s (AWS API 1.7). Other names stay.\n\n"
        "    Args:\n        state_dict: Whole tensors, by name.\n        max_seq_len: No effect: masks are in no state "
        "dict.\n\n    Returns:\n        The state dict with the other names; tensors may share memory.\n"
    )
    return translate


def translations(root: nn.Module) -> Iterator[tuple[Callable[..., Any], Callable[..., Any]]]:
    """Yields functions to Hugging Face's names and back, for the families in a model."""
    parts = [part for part in root.modules() if isinstance(part, (DistributedCausalLM, DistributedEncoder))]
    for family, heads in {id(part.family): (part.family, part.heads) for part in parts}.values():
        yield (
            functools.partial(to_huggingface, family, heads=heads),
            functools.partial(to_smdistributed, family, heads=heads),
        )


def _make_module(name: str, functions: str) -> ModuleType:
    module = ModuleType(f"{__name__}.{name}", f"State dicts of a model: see {__name__}.")
    for function in functions.split():
        setattr(module, f"translate_{function}", _make_translation(f"translate_{function}", FAMILIES[name]))
    sys.modules[module.__name__] = module
    return module


bert, gpt2, gptj, gptneo, roberta = (_make_module(name, functions) for name, functions in TRANSLATIONS.items())


# --- tensor-parallel models


class DistributedCausalLM(DistributedTransformerLMHead):
    """A `DistributedTransformerLMHead` with the `forward` of Hugging Face's causal language models.

    `family` and `heads` are for translations. `config` is Hugging Face's.
    """

    family: Family
    heads: int
    config: Any

    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **others: Any,
    ) -> Any:
        """Returns Hugging Face's CausalLMOutput: `loss` if there are labels, and `logits`.

        Args:
            input_ids: [N, S].
            attention_mask: [N, S], with 1 for positions that are seen; None: all.
            position_ids: [N, S] or [1, S]; None: 0, 1, 2, …
            labels: [N, S]; -100 does not count. They are shifted here.
            **others: Must be None or False, except `use_cache` and `return_dict`, which have no effect.

        Raises:
            SMPUnsupportedError: For another argument.
        """
        _refuse_arguments(type(self).__name__, others)
        mask = None if attention_mask is None else 1 - attention_mask.long()
        output = super().forward((input_ids, mask, None, position_ids, labels))
        outputs: Any = sys.modules["transformers.modeling_outputs"]
        loss, logits = (None, output) if labels is None else output
        return outputs.CausalLMOutput(loss=loss, logits=logits)


class DistributedEncoder(DistributedTransformer):
    """A `DistributedTransformer` with the `forward` of Hugging Face's encoders of BERT."""

    family: Family
    heads: int
    config: Any

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any = None, *rest: Any, **others: Any) -> Any:  # type: ignore[override]
        """Returns the output of Hugging Face, with `last_hidden_state` alone.

        Args:
            hidden_states: [N, S, channels].
            attention_mask: Added to the scores, or True for positions that are seen.
            *rest: Must be None.
            **others: Must be None or False, except `use_cache` and `return_dict`, which have no effect.

        Raises:
            SMPUnsupportedError: For another argument.
        """
        _refuse_arguments(type(self).__name__, {**others, **{str(place): value for place, value in enumerate(rest)}})
        outputs: Any = sys.modules["transformers.modeling_outputs"]
        return outputs.BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=super().forward((hidden_states, attention_mask))[0]
        )


_HARMLESS = ("use_cache", "return_dict", "cache_position")


def _refuse_arguments(name: str, others: Mapping[str, Any]) -> None:
    given = [key for key, value in others.items() if key not in _HARMLESS and value is not None and value is not False]
    if given:
        raise SMPUnsupportedError(
            f"{name} does not take {', '.join(given)}. Fix: leave it out, or leave the model out "
            "of tensor parallelism (use_distributed_transformer=0 in AWS's scripts)."
        )


def _arguments_of_gpt2(config: Any) -> dict[str, Any]:
    return {
        "intermediate_size": config.n_inner or 4 * config.hidden_size,
        "num_positions": config.n_positions,
        "causal_mask_size": config.n_positions,
        "attention_dropout_prob": config.attn_pdrop,
        "hidden_dropout_prob": config.resid_pdrop,
        "activation": config.activation_function,
        "scale_attention_scores": config.scale_attn_weights,
        "scale_attn_by_layer_idx": config.scale_attn_by_inverse_layer_idx,
        "attention_in_fp32": config.reorder_and_upcast_attn,
    }


def _arguments_of_gptj(config: Any) -> dict[str, Any]:
    return {
        "intermediate_size": config.n_inner or 4 * config.hidden_size,
        "num_positions": 0,
        "causal_mask_size": config.n_positions,
        "attention_dropout_prob": config.attn_pdrop,
        "hidden_dropout_prob": config.resid_pdrop,
        "activation": config.activation_function,
        "rotary_dim": config.rotary_dim or config.hidden_size // config.num_attention_heads,
        "parallel_attn_output": True,
        "single_pre_layernorm": True,
        "query_key_value_bias": False,
        "dense_bias": False,
        "lm_head_bias": True,
    }


def _arguments_of_gptneo(config: Any) -> dict[str, Any]:
    windows = [config.window_size if kind == "local" else None for kind in config.attention_layers]
    return {
        "intermediate_size": config.intermediate_size or 4 * config.hidden_size,
        "num_positions": config.max_position_embeddings,
        "causal_mask_size": config.max_position_embeddings,
        "attention_dropout_prob": config.attention_dropout,
        "hidden_dropout_prob": config.resid_dropout,
        "activation": config.activation_function,
        "scale_attention_scores": False,
        "query_key_value_bias": False,
        "layers": [{"window_size": window} for window in windows],
    }


def _arguments_of_gptneox(config: Any) -> dict[str, Any]:
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise SMPUnsupportedError("its rotary embedding is scaled. Fix: leave it out of tensor parallelism.")
    share = rope.get("partial_rotary_factor", getattr(config, "rotary_pct", 1.0))
    return {
        "intermediate_size": config.intermediate_size,
        "num_positions": 0,
        "causal_mask_size": config.max_position_embeddings,
        "attention_dropout_prob": config.attention_dropout,
        "hidden_dropout_prob": config.hidden_dropout,
        "activation": config.hidden_act,
        "rotary_dim": int(config.hidden_size // config.num_attention_heads * share),
        "rotary_emb_base": rope.get("rope_theta", getattr(config, "rotary_emb_base", 10000.0)),
        "gpt_neox_type_rotary": True,
        "parallel_attn_output": config.use_parallel_residual,
        "query_key_value_bias": getattr(config, "attention_bias", True),
        "dense_bias": getattr(config, "attention_bias", True),
    }


_CAUSAL: dict[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    "GPT2LMHeadModel": ("gpt2", _arguments_of_gpt2),
    "GPTJForCausalLM": ("gptj", _arguments_of_gptj),
    "GPTNeoForCausalLM": ("gptneo", _arguments_of_gptneo),
    "GPTNeoXForCausalLM": ("gptneox", _arguments_of_gptneox),
}
"""Hugging Face's classes: the family, and the arguments of `DistributedTransformerLMHead`."""
_ENCODERS = {"BertEncoder": "bert", "RobertaEncoder": "roberta"}


def make_causal_lm(
    module: Any,
    attention_in_fp32: bool = False,
    fp32_residual_addition: bool = False,
    distribute_embedding: bool = False,
    use_alibi: bool = False,
) -> DistributedCausalLM:
    """Makes the tensor-parallel version of a causal language model of transformers, with its weights."""
    name, arguments = _CAUSAL[type(module).__name__]
    config, family = module.config, FAMILIES[name]
    if getattr(config, "add_cross_attention", False):
        raise SMPUnsupportedError("it has cross-attention. Fix: leave it out of tensor parallelism.")
    given = {
        **_common_arguments(config),
        "num_layers": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "tie_weights": bool(getattr(config, "tie_word_embeddings", True)),
        "pre_layernorm": True,
        "post_layernorm": False,
        "distribute_embedding": distribute_embedding,
        "use_alibi": use_alibi,
        "fp32_residual_addition": fp32_residual_addition,
        **arguments(config),
    }
    given["attention_in_fp32"] = attention_in_fp32 or given.get("attention_in_fp32", False)
    if _has_initial_weights(module):
        with torch.device("meta"):
            made = DistributedCausalLM(**given)
        _take_weights(made, module, family)
    else:
        is_delayed = any(parameter.is_meta for parameter in module.parameters())
        with delay_param_initialization(is_delayed):
            made = DistributedCausalLM(
                **given, use_normal_initialization=True, initializer_range=config.initializer_range
            )
    made.dropout.p = _embedding_dropout(config)
    made.family, made.config, made.heads = family, config, config.num_attention_heads
    return made


def _has_initial_weights(module: Any) -> bool:
    """Whether transformers has initialized a model.

    Published scripts replace `init_weights`, because AWS's library draws new weights for the modules that it replaces.
    """
    return bool(type(module).init_weights.__module__.startswith("transformers."))


def _embedding_dropout(config: Any) -> float:
    names = ("embd_pdrop", "embed_dropout", "hidden_dropout")
    return float(next(getattr(config, name) for name in names if hasattr(config, name)))


def make_encoder(
    module: Any, attention_in_fp32: bool = False, fp32_residual_addition: bool = False
) -> DistributedEncoder:
    """Makes the tensor-parallel version of an encoder of BERT or RoBERTa of transformers, with its weights."""
    config, family = module.config, FAMILIES[_ENCODERS[type(module).__name__]]
    if config.is_decoder or getattr(config, "position_embedding_type", "absolute") not in (None, "absolute"):
        raise SMPUnsupportedError(
            "it is a decoder, or has relative positions. Fix: leave it out of tensor parallelism."
        )
    with torch.device("meta"):
        made = DistributedEncoder(
            config.num_hidden_layers,
            **_common_arguments(config),
            intermediate_size=config.intermediate_size,
            attention_dropout_prob=config.attention_probs_dropout_prob,
            hidden_dropout_prob=config.hidden_dropout_prob,
            activation=config.hidden_act,
            attention_in_fp32=attention_in_fp32,
            fp32_residual_addition=fp32_residual_addition,
        )
    _take_weights(made, module, family, "encoder.")
    made.family, made.config, made.heads = family, config, config.num_attention_heads
    return made


def _common_arguments(config: Any) -> dict[str, Any]:
    return {
        "num_attention_heads": config.num_attention_heads,
        "attention_head_size": config.hidden_size // config.num_attention_heads,
        "hidden_size": config.hidden_size,
        "layernorm_epsilon": getattr(config, "layer_norm_epsilon", None) or config.layer_norm_eps,
    }


def _take_weights(made: Any, module: nn.Module, family: Family, prefix: str = "") -> None:
    """Gives a module on the meta device the weights of Hugging Face's. `prefix`: its name in a whole model."""
    config: Any = module.config
    plain = {f"{prefix}{name}": p for name, p in module.named_parameters(remove_duplicate=False)}
    weights = to_smdistributed(family, {name: p.detach() for name, p in plain.items()}, config.num_attention_heads)
    trained = all(p.requires_grad for p in plain.values())
    if not trained and any(p.requires_grad for p in plain.values()):
        raise SMPUnsupportedError("some of its parameters are frozen. Fix: freeze them after smp.DistributedModel.")
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for owner, part in made.named_modules():
        for key, parameter in list(part._parameters.items()):
            if parameter is None:
                continue
            if parameter not in replaced:
                name = f"{prefix}{owner}.{key}"
                split = split_of(parameter)
                value = weights[name] if split is None else take_share(weights[name], split)
                value = value if value.is_meta else value.clone(memory_format=torch.contiguous_format)
                replaced[parameter] = nn.Parameter(value, trained)
                copy_split(parameter, replaced[parameter])
            part._parameters[key] = replaced[parameter]


def _find(module: nn.Module) -> Registration | None:
    """Returns the registration of a module of transformers; None for another one."""
    cls = type(module)
    if not cls.__module__.startswith("transformers."):
        return None
    if cls.__name__ in _CAUSAL:
        return Registration(DistributedCausalLM, from_plain=make_causal_lm)
    return Registration(DistributedEncoder, from_plain=make_encoder) if cls.__name__ in _ENCODERS else None


register_late(_find)
