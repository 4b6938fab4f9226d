"""Hugging Face's models: tensor-parallel versions, and translations of their state dicts both ways (AWS API 1.7).

`smp.DistributedModel` replaces marked models of `FAMILIES`, with their weights. `families` has a table for each kind of
models, so that one function translates in either direction.

The modules have AWS's functions `translate_…`, which `PUBLISHED` lists, with the arguments `(state_dict,
max_seq_len=None)`. `get_hf_gpt2_transformer_layer_hooks`, also in `gpt2`, replaces layers of GPT-2 alone. For such
models, and for the state dict of one layer, there are `gpt2.translate_hf_block_state_dict_to_smdistributed` and
`gpt2.translate_layer_state_dict_to_hf_gpt2_block`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import nn

from smdistributed.core.options import warn_without_effect
from smdistributed.modelparallel.backend.exceptions import SMPUnsupportedError
from smdistributed.modelparallel.torch.nn.families import FAMILIES, GPT2_BLOCK, PUBLISHED, Family
from smdistributed.modelparallel.torch.nn.module import copy_split, split_of, take_share
from smdistributed.modelparallel.torch.nn.replacement import Registration, register_late
from smdistributed.modelparallel.torch.nn.transformer import (
    DistributedTransformer,
    DistributedTransformerLayer,
    DistributedTransformerLMHead,
)
from smdistributed.modelparallel.torch.nn.translation import Weights, to_huggingface, to_smdistributed
from smdistributed.modelparallel.torch.plan.construction import delay_param_initialization

__all__ = ["bert", "get_hf_gpt2_transformer_layer_hooks", "gpt2", "gptj", "gptneo", "roberta"]


# --- translation


def _make_translation(name: str, family: Family) -> Callable[..., Any]:
    """Makes the published function of that name."""
    back = "_to_hf_" in name

    def translate(state_dict: Weights, max_seq_len: int | None = None) -> dict[str, torch.Tensor]:
        return to_huggingface(family, state_dict) if back else to_smdistributed(family, state_dict)

    translate.__name__ = translate.__qualname__ = name
    source, target = ("smp.nn", "Hugging Face") if back else ("Hugging Face", "smp.nn")
    translate.__doc__ = (
        f"Translates a state dict from {source}'s names to {target}'s (AWS API 1.7). Other names stay.\n\n"
        "    Args:\n        state_dict: Whole tensors, by name.\n        max_seq_len: No effect: masks are in no state "
        "dict.\n\n    Returns:\n        The state dict with the other names; tensors may share memory.\n"
    )
    return translate


def translations(root: nn.Module) -> Iterator[tuple[Callable[..., Any], Callable[..., Any]]]:
    """Yields functions to Hugging Face's names and back, for each replaced model in a model."""
    for name, part in root.named_modules(remove_duplicate=False):
        if isinstance(part, (DistributedCausalLM, DistributedEncoder, DistributedBlock)):
            known: dict[str, Any] = {"heads": part.heads, "prefix": f"{name}." if name else ""}
            yield (
                functools.partial(to_huggingface, part.family, **known),
                functools.partial(to_smdistributed, part.family, **known),
            )


def _make_module(name: str) -> ModuleType:
    module = ModuleType(f"{__name__}.{name}", f"State dicts: see {__name__}.")
    for function, family in PUBLISHED[name].items():
        setattr(module, f"translate_{function}", _make_translation(f"translate_{function}", family))
    sys.modules[module.__name__] = module
    return module


bert, gpt2, gptj, gptneo, roberta = (_make_module(name) for name in PUBLISHED)


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


class DistributedBlock(DistributedTransformerLayer):
    """A `DistributedTransformerLayer` that replaces a layer of Hugging Face's, with its weights."""

    family: Family
    heads: int
    config: Any


_HARMLESS = ("use_cache", "return_dict", "cache_position")


def _refuse_arguments(name: str, others: Mapping[str, Any]) -> None:
    given = [key for key, value in others.items() if key not in _HARMLESS and _is_given(value)]
    if given:
        raise SMPUnsupportedError(
            f"{name} does not take {', '.join(given)}. Fix: leave it out, or leave the model out "
            "of tensor parallelism (use_distributed_transformer=0 in AWS's scripts). For a cache: use_cache=False in "
            "the model's configuration."
        )


def _is_given(value: Any) -> bool:
    """Whether it is, or has, something else than None and False: BERT of transformers 4 gives a None for each layer."""
    if isinstance(value, (list, tuple)):
        return any(map(_is_given, value))
    return value is not None and value is not False


def _refuse_cross_attention(config: Any) -> None:
    if getattr(config, "add_cross_attention", False):
        raise SMPUnsupportedError("it has cross-attention. Fix: leave it out of tensor parallelism.")


_Made = TypeVar("_Made", DistributedCausalLM, DistributedEncoder, DistributedBlock)


def make_causal_lm(
    module: Any,
    attention_in_fp32: bool = False,
    fp32_residual_addition: bool = False,
    distribute_embedding: bool = False,
    use_alibi: bool = False,
) -> DistributedCausalLM:
    """Makes the tensor-parallel version of a causal language model of transformers, with its weights."""
    config, family = module.config, FAMILIES[type(module).__name__]
    _refuse_cross_attention(config)
    if hasattr(module, "embed_out"):  # GPT-NeoX of transformers 4: its name comes before the newer one
        family = dataclasses.replace(family, outside={"embed_out": "lm_head", **family.outside})
    options = {"distribute_embedding": distribute_embedding, "use_alibi": use_alibi}
    options["fp32_residual_addition"] = fp32_residual_addition
    made = _make(DistributedCausalLM, module, config, family, attention_in_fp32, options)
    dropouts = ("embd_pdrop", "embed_dropout", "hidden_dropout")
    made.dropout.p = float(next(getattr(config, name) for name in dropouts if hasattr(config, name)))
    return made


def make_encoder(
    module: Any, attention_in_fp32: bool = False, fp32_residual_addition: bool = False
) -> DistributedEncoder:
    """Makes the tensor-parallel version of an encoder of BERT or RoBERTa of transformers, with its weights."""
    config, family = module.config, FAMILIES[type(module).__name__]
    if config.is_decoder or getattr(config, "position_embedding_type", "absolute") not in (None, "absolute"):
        raise SMPUnsupportedError(
            "it is a decoder, or has relative positions. Fix: leave it out of tensor parallelism."
        )
    options = {"fp32_residual_addition": fp32_residual_addition}
    return _make(DistributedEncoder, module, config, family, attention_in_fp32, options)


class _LayerHook:
    """The hook for the constructor of a layer; `from_plain` also keeps the weights of a layer that is there."""

    dist_module = DistributedTransformerLayer
    """With another class, a layer is constructed, and its weights are new."""

    def __init__(self, family: Family) -> None:
        self._family = family

    def __call__(self, config: Any, layer_idx: int | None = None) -> tuple[tuple[()], dict[str, Any]]:
        return (), {**_arguments(config, self._family), "layer_idx": layer_idx}

    def from_plain(self, layer: Any, attention_in_fp32: bool = False, **options: Any) -> DistributedBlock:
        config = getattr(layer.attn, "config", None)
        if config is None:
            raise SMPUnsupportedError("it does not hold its configuration. Fix: update transformers to 4.44 or later.")
        _refuse_cross_attention(config)
        options = {"layer_idx": layer.attn.layer_idx, **options}
        return _make(DistributedBlock, layer, config, self._family, attention_in_fp32, options)


def get_hf_gpt2_transformer_layer_hooks() -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Returns hooks that make a DistributedTransformerLayer of a GPT2Block (scripts of AWS).

    They are for `smp.tp_register_with_module(GPT2Block, smp.nn.DistributedTransformerLayer, *hooks)`, also after the
    model is constructed. A replaced layer keeps its weights. It takes no cache: set `use_cache=False`.

    Returns:
        The hooks for the constructor, for the arguments of `forward` and for its output.

    Raises:
        ImportError: Without transformers.
    """
    block: Any = importlib.import_module("transformers.models.gpt2.modeling_gpt2").GPT2Block
    signature = inspect.signature(block.forward)

    def forward_hook(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = signature.bind(None, *args, **kwargs).arguments
        others = {**given, **given.get("kwargs", {})}
        hidden, mask = others.pop("hidden_states"), others.pop("attention_mask", None)
        _refuse_arguments("GPT2Block", {key: value for key, value in others.items() if key not in _NOT_OF_LAYERS})
        return ((hidden, mask),), {}

    def return_hook(output: tuple[Any, ...]) -> Any:
        # transformers 4 expects a tuple of the states and the cache
        return (output[0], None) if "output_attentions" in signature.parameters else output[0]

    return _LayerHook(GPT2_BLOCK), forward_hook, return_hook


_NOT_OF_LAYERS = ("self", "kwargs", "position_ids")  # GPT-2 adds its positions to the embedding
gpt2.get_hf_gpt2_transformer_layer_hooks = get_hf_gpt2_transformer_layer_hooks  # type: ignore[attr-defined]


def _make(
    cls: type[_Made], module: Any, config: Any, family: Family, in_fp32: bool, options: Mapping[str, Any]
) -> _Made:
    given = {**_arguments(config, family), **options}
    given["attention_in_fp32"] = in_fp32 or given.get("attention_in_fp32", False)
    if _has_initial_weights(module):
        for name in {"use_normal_initialization", "initializer_range"} & options.keys():
            warn_without_effect(f"{name} for {type(module).__name__}", "it keeps its weights")
        with torch.device("meta"):
            made = cls(**given)
        _take_weights(made, module, config, family)
    else:
        is_delayed = any(parameter.is_meta for parameter in module.parameters())
        with delay_param_initialization(is_delayed):
            initial = {"use_normal_initialization": True, "initializer_range": config.initializer_range}
            made = cls(**{**initial, **given})
    made.family, made.config, made.heads = family, config, config.num_attention_heads
    return made


def _arguments(config: Any, family: Family) -> dict[str, Any]:
    """Returns the arguments of `smp.nn` that a configuration gives."""
    return {name: _read(config, source) for name, source in family.arguments.items()}


def _read(config: Any, source: Any) -> Any:
    """Returns an argument, by its entry in `Family.arguments`."""
    if isinstance(source, str):
        return getattr(config, source)
    return source(config) if callable(source) else source


def _has_initial_weights(module: Any) -> bool:
    """Whether transformers has initialized a model.

    Published scripts replace `init_weights`, because AWS's library draws new weights for the modules that it replaces.
    """
    own: Any = getattr(type(module), "init_weights", None)
    return own is None or bool(own.__module__.startswith("transformers."))


def _take_weights(made: Any, module: nn.Module, config: Any, family: Family) -> None:
    """Gives a module on the meta device the weights of Hugging Face's."""
    plain = dict(module.named_parameters(remove_duplicate=False))
    detached = {name: parameter.detach() for name, parameter in plain.items()}
    weights = to_smdistributed(family, detached, config.num_attention_heads, "")
    trained = all(p.requires_grad for p in plain.values())
    if not trained and any(p.requires_grad for p in plain.values()):
        raise SMPUnsupportedError("some of its parameters are frozen. Fix: freeze them after smp.DistributedModel.")
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for owner, part in made.named_modules():
        for key, parameter in list(part._parameters.items()):
            if parameter is None:
                continue
            if parameter not in replaced:
                name = f"{owner}.{key}"
                split = split_of(parameter)
                value = weights[name] if split is None else take_share(weights[name], split)
                value = value if value.is_meta else value.clone(memory_format=torch.contiguous_format)
                replaced[parameter] = nn.Parameter(value, trained)
                copy_split(parameter, replaced[parameter])
            part._parameters[key] = replaced[parameter]


def _find(module: nn.Module) -> Registration | None:
    """Returns the registration of a module of transformers; None for another one."""
    cls = type(module)
    if not cls.__module__.startswith("transformers.") or cls.__name__ not in FAMILIES:
        return None
    if cls.__name__.endswith("Encoder"):
        return Registration(DistributedEncoder, from_plain=make_encoder)
    return Registration(DistributedCausalLM, from_plain=make_causal_lm)


register_late(_find)
