"""Hugging Face's models: tensor-parallel versions, and translations of their state dicts both ways (AWS API 1.7).

`smp.DistributedModel` replaces marked models of `FAMILIES`, with their weights. `families` has a table for each kind of
models, so that one function translates in either direction. Nothing here imports transformers.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from smdistributed.modelparallel.backend.exceptions import SMPUnsupportedError
from smdistributed.modelparallel.torch.nn.families import FAMILIES, PUBLISHED, Family
from smdistributed.modelparallel.torch.nn.module import copy_split, split_of, take_share
from smdistributed.modelparallel.torch.nn.replacement import Registration, register_late
from smdistributed.modelparallel.torch.nn.transformer import DistributedTransformer, DistributedTransformerLMHead
from smdistributed.modelparallel.torch.plan.construction import delay_param_initialization

__all__ = ["bert", "gpt2", "gptj", "gptneo", "roberta"]
_Weights = Mapping[str, torch.Tensor]


# --- translation


class _Rule(NamedTuple):
    """A module's name there, and its names here. `{}` is the number of a layer."""

    theirs: str
    ours: tuple[str, ...]
    is_inside: bool


class _Found(NamedTuple):
    """The rule for the name of a tensor, and the name's other parts."""

    rule: _Rule
    before: str
    number: str
    kind: str

    def name(self, template: str) -> str:
        return f"{self.before}{template.format(self.number)}.{self.kind}"


def to_smdistributed(
    family: Family, weights: _Weights, heads: int = 1, prefix: str | None = None
) -> dict[str, torch.Tensor]:
    """Translates Hugging Face's state dict. Other names stay. Tensors are views of the given ones.

    `heads`: the number of attention heads, for families with `per_head`. `prefix`: the part of names before the
    model's; None: anything before layers, and nothing before other names.
    """
    found: dict[str, torch.Tensor] = {}
    rules = [(rule.theirs, rule) for rule in _rules(family) if rule.theirs]
    for name, tensor in weights.items():
        place = _find_rule(rules, name, prefix)
        if place is None:
            found[name] = tensor
            continue
        targets = [place.name(ours) for ours in place.rule.ours]
        if targets:
            whole = tensor.t() if _is_transposed(family, place, tensor) else tensor
            found.update(zip(targets, _divide(whole, len(targets), heads if family.per_head else 1)))
    return found


def to_huggingface(
    family: Family, weights: _Weights, heads: int = 1, prefix: str | None = None
) -> dict[str, torch.Tensor]:
    """Translates a state dict of `smp.nn` back. The inverse of `to_smdistributed`."""
    found: dict[str, torch.Tensor] = {}
    rules = [(ours, rule) for rule in _rules(family) for ours in rule.ours]
    for name, tensor in weights.items():
        place = _find_rule(rules, name, prefix)
        if place is None:
            found[name] = tensor
        elif place.rule.theirs and place.name(place.rule.theirs) not in found:
            parts = [weights[place.name(ours)] for ours in place.rule.ours]
            whole = _join(parts, heads if family.per_head else 1)
            is_transposed = _is_transposed(family, place, whole)
            found[place.name(place.rule.theirs)] = whole.t().contiguous() if is_transposed else whole
    return found


def _rules(family: Family) -> Iterator[_Rule]:
    theirs, ours = family.layer
    for name, names in family.inside.items():
        inside = names if isinstance(names, tuple) else (names,)
        yield _Rule(f"{theirs}.{name}" if name else "", tuple(f"{ours}.{each}" for each in inside), True)
    for name, other in family.outside.items():
        yield _Rule(name, (other,), False)


def _find_rule(rules: list[tuple[str, _Rule]], name: str, prefix: str | None) -> _Found | None:
    for template, rule in rules:
        match = _pattern(template).fullmatch(name)
        if match:
            before = match["before"]
            if before == prefix or (prefix is None and (rule.is_inside or not before)):
                return _Found(rule, before, match.groupdict().get("number", ""), match["kind"])
    return None


@functools.cache
def _pattern(template: str) -> re.Pattern[str]:
    module = re.escape(template).replace(r"\{\}", r"(?P<number>\d+)")
    return re.compile(rf"(?P<before>(.*\.)?){module}\.(?P<kind>weight|bias|masked_bias|inv_freq)")


def _is_transposed(family: Family, place: _Found, tensor: torch.Tensor) -> bool:
    return family.transposed and place.rule.is_inside and tensor.dim() == 2


def _divide(tensor: torch.Tensor, count: int, heads: int) -> list[torch.Tensor]:
    """Divides rows into `count` tensors. With `heads`, each head has its rows of all of them together."""
    if count == 1:  # it may be a part of a sharded tensor
        return [tensor]
    apart = tensor.reshape(heads, count, -1, *tensor.shape[1:])
    return [apart[:, place].flatten(0, 1) for place in range(count)]


def _join(parts: list[torch.Tensor], heads: int) -> torch.Tensor:
    """The inverse of `_divide`."""
    if len(parts) == 1:
        return parts[0]
    return torch.stack([part.reshape(heads, -1, *part.shape[1:]) for part in parts], 1).flatten(0, 2)


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
    """Yields functions to Hugging Face's names and back, for each replaced model in a model."""
    for name, part in root.named_modules(remove_duplicate=False):
        if isinstance(part, (DistributedCausalLM, DistributedEncoder)):
            known: dict[str, Any] = {"heads": part.heads, "prefix": f"{name}." if name else ""}
            yield (
                functools.partial(to_huggingface, part.family, **known),
                functools.partial(to_smdistributed, part.family, **known),
            )


def _make_module(name: str) -> ModuleType:
    module, (family, functions) = ModuleType(f"{__name__}.{name}", f"State dicts: see {__name__}."), PUBLISHED[name]
    for function in functions.split():
        setattr(module, f"translate_{function}", _make_translation(f"translate_{function}", family))
    sys.modules[module.__name__] = module
    return module


bert, gpt2, gptj, gptneo, roberta = (_make_module(name) for name in __all__)


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
    given = [key for key, value in others.items() if key not in _HARMLESS and _is_given(value)]
    if given:
        raise SMPUnsupportedError(
            f"{name} does not take {', '.join(given)}. Fix: leave it out, or leave the model out "
            "of tensor parallelism (use_distributed_transformer=0 in AWS's scripts)."
        )


def _is_given(value: Any) -> bool:
    """Whether it is, or has, something else than None and False: BERT of transformers 4 gives a None for each layer."""
    if isinstance(value, (list, tuple)):
        return any(map(_is_given, value))
    return value is not None and value is not False


_Made = TypeVar("_Made", DistributedCausalLM, DistributedEncoder)


def make_causal_lm(
    module: Any,
    attention_in_fp32: bool = False,
    fp32_residual_addition: bool = False,
    distribute_embedding: bool = False,
    use_alibi: bool = False,
) -> DistributedCausalLM:
    """Makes the tensor-parallel version of a causal language model of transformers, with its weights."""
    config, family = module.config, FAMILIES[type(module).__name__]
    if getattr(config, "add_cross_attention", False):
        raise SMPUnsupportedError("it has cross-attention. Fix: leave it out of tensor parallelism.")
    if hasattr(module, "embed_out"):  # GPT-NeoX of transformers 4: its name comes before the newer one
        family = dataclasses.replace(family, outside={"embed_out": "lm_head", **family.outside})
    options = {"distribute_embedding": distribute_embedding, "use_alibi": use_alibi}
    options["fp32_residual_addition"] = fp32_residual_addition
    made = _make(DistributedCausalLM, module, family, attention_in_fp32, options)
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
    return _make(DistributedEncoder, module, family, attention_in_fp32, options)


def _make(cls: type[_Made], module: Any, family: Family, in_fp32: bool, options: Mapping[str, Any]) -> _Made:
    given = {**{name: _read(module.config, source) for name, source in family.arguments.items()}, **options}
    given["attention_in_fp32"] = in_fp32 or given.get("attention_in_fp32", False)
    if _has_initial_weights(module):
        with torch.device("meta"):
            made = cls(**given)
        _take_weights(made, module, family)
    else:
        is_delayed = any(parameter.is_meta for parameter in module.parameters())
        with delay_param_initialization(is_delayed):
            deviation = module.config.initializer_range
            made = cls(**given, use_normal_initialization=True, initializer_range=deviation)
    made.family, made.config, made.heads = family, module.config, module.config.num_attention_heads
    return made


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


def _take_weights(made: Any, module: nn.Module, family: Family) -> None:
    """Gives a module on the meta device the weights of Hugging Face's."""
    config: Any = module.config
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
